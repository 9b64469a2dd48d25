"""A running OpenAI-compatible server as a source of answers: token ids in, token ids out, as `engine.Engine.generate` has them.

Prompts go as ids to its completions endpoint and the answers' ids come back in vLLM's extension (`return_token_ids`), so no
text is tokenised again. One request before the work shows that it gives ids and renders a chat as the target's template does.
"""

import os
from typing import Any

from kimi_eagle.chat import render_chat
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.target import Target

# Ids, and sampling as in our engines: what a request leaves open a server takes from the checkpoint's generation_config.
EXTRA = {"return_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class Server:
    """The first model of the server at `url` (http://host:port/v1); `limit` is its longest row in tokens, 0 where it does not say.

    MissingCapability where it does not answer or gives no ids; BadInput where it renders a chat otherwise than `target`.
    """

    def __init__(self, url: str, target: Target):
        try:
            import openai
        except ImportError:
            raise MissingCapability("regenerate: --server needs the package openai, which comes with vLLM.") from None
        self.api, self.url = openai, url
        try:
            # Its own retries: two more tries of what fails on the way or is answered with 408, 409, 429 or 5xx.
            self.client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none")
            self.model, self.limit = self._probe(target)
        except openai.APIConnectionError:
            raise MissingCapability(f"server {url}: does not answer; start it, or correct the address.") from None
        except openai.APIStatusError as error:
            raise BadInput(f"server {url}: {_status(error)}; the address ends in /v1.") from None
        except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"server {url}: not an OpenAI-compatible address ({type(error).__name__}); give http://host:port/v1."
            ) from None

    def generate(self, requests: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        """Answers to `requests` ({id, prompt_token_ids, seed}): {id, token_ids, finish_reason}, or {id, error} for one that failed.

        options: max_tokens, temperature. MissingCapability where the server is gone.
        """
        return [{"id": r["id"], **self._answer(r, options)} for r in requests]

    def _answer(self, request: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        try:
            found = self.client.completions.create(
                model=self.model, prompt=request["prompt_token_ids"], seed=request["seed"], top_p=1.0,
                extra_body=EXTRA, **options,
            )  # fmt: skip
            choice = found.choices[0]
        except self.api.APITimeoutError:
            return {"error": "the server took too long"}
        except self.api.APIConnectionError:
            raise MissingCapability(f"server {self.url}: answers no more; start it again and run this again.") from None
        except self.api.APIStatusError as error:
            return {"error": _status(error)}
        except (self.api.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            return {"error": f"the server's answer is not one ({type(error).__name__})"}
        ids = _extra(choice, "token_ids")
        if not isinstance(ids, list):
            return {"error": "the server gave no token ids"}
        return {"token_ids": ids, "finish_reason": choice.finish_reason}

    def _probe(self, target: Target) -> tuple[str, int]:
        client = self.client.with_options(max_retries=0, timeout=60)
        card = client.models.list().data[0]
        asked = [{"role": "user", "content": "Hello"}]
        found = client.chat.completions.create(
            model=card.id, messages=asked, max_tokens=1, temperature=0, extra_body=EXTRA
        )
        rendered = _extra(found, "prompt_token_ids")
        if not isinstance(rendered, list) or not isinstance(_extra(found.choices[0], "token_ids"), list):
            raise MissingCapability(
                f"server {self.url}: gives no token ids with its answers; use one that knows return_token_ids (vLLM's does)."
            )
        if rendered != render_chat(target, asked):
            raise BadInput(
                f"server {self.url}: {card.id} renders a chat to other tokens than {target.name}; serve that target, "
                "with its own chat template."
            )
        return card.id, int(_extra(card, "max_model_len") or 0)


def _extra(answer: Any, name: str) -> Any:
    return (answer.model_extra or {}).get(name)


def _status(error: Any) -> str:
    return " ".join(str(error.message).split())[:160]
