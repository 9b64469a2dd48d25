"""One rank's torch-profiler trace as a table of events, with its engine steps. traceinsight (`import hta`) does the reading.

Its streaming back end keeps a 500 MB trace within about 1 GB of memory. Its habit of rounding to whole microseconds is switched
off here: an AllReduce of one token takes ten.
"""

import gzip
import logging
import re
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.allreduce import names
from kimi_eagle.errors import BadInput

# vLLM's step annotation, plain and detailed: requests and tokens in prefill ("context") and in decode ("generation").
_STEP = re.compile(r"^execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)\D.*?_generation_(\d+)\((?:sq)?(\d+)")
_STEP_PLAIN = re.compile(r"^execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
_LOOP_STEP = re.compile(r"^ProfilerStep#\d+")
_STEP_NAMES = r"^(execute_|ProfilerStep#)"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WRAPPERS = (
    "Torch-Compiled Region",
    "CompiledFunction",
    "Pregraph bytecode",
)  # they span the operators that count, and the gaps
# Of no use here, and most of a GPU trace: launches, arrows, Python frames.
_SKIPPED = {"python_function", "ac2g", "async_cpu_to_gpu", "fwdbwd", "cuda_runtime", "cuda_driver", "cuda_sync", "overhead", "cpu_instant_event"}  # fmt: skip
_ITEM_SIZE = {"double": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "half": 2, "float16": 2, "bfloat16": 2,
              "c10::bfloat16": 2, "c10::half": 2, "char": 1, "byte": 1, "bool": 1, "fp8": 1}  # fmt: skip


@dataclass(frozen=True)
class RankTrace:
    """One rank. events: name, start, end [us], lane, kind, implementation, fused, bytes (NaN where the trace does not say).

    steps: start [us], prefill_requests, prefill_tokens, requests, tokens (of decode), in order of time. on_device: events are
    GPU kernels; otherwise operators of the thread that runs the model, and collectives of any thread.
    """

    path: Path
    rank: int
    world_size: int
    on_device: bool
    events: pd.DataFrame
    steps: pd.DataFrame


def read(path: str | Path) -> RankTrace:
    """The trace file `path` (.json or .json.gz). BadInput where it is missing, cut off, or holds no events."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(
            f"trace {path}: there is no such file; give the .json or .json.gz that the profiler wrote for one rank."
        )
    meta, table = _parse(path)
    distributed = meta.get("distributedInfo") or {}
    rank, world_size = distributed.get("rank"), distributed.get("world_size")
    if rank is None and (found := re.search(r"rank[_-]?(\d+)", path.name)):
        rank = int(found[1])
    annotations = table[table["cat"].isin(["user_annotation", "gpu_user_annotation"])]
    on_device = bool(table["cat"].isin(_DEVICE).any())
    steps = _steps(annotations, on_device)
    named = table["name"].astype(str)
    # gloo's transfers are annotations of gloo's own threads, not operators.
    wanted = table["cat"].isin(_DEVICE) if on_device else (table["cat"] == "cpu_op") | named.str.startswith("gloo:")
    events = table[wanted & ~named.str.startswith(_WRAPPERS)].copy()
    events = _labelled(events, str(distributed.get("backend") or ""))
    if not on_device:
        events = _one_thread(events, annotations)
    columns = ["name", "start", "end", "lane", "kind", "implementation", "fused", "bytes"]
    events = events.sort_values("start", kind="stable")[columns].reset_index(drop=True)
    return RankTrace(path, int(rank or 0), int(world_size or 1), on_device, events, steps)


def _parse(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    import ijson
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.env_options import HTAEnvOptions
    from hta.configs.parser_config import ParserBackend, ParserConfig

    config = ParserConfig(
        args=ParserConfig.ARGS_MINIMUM + ParserConfig.ARGS_INPUT_SHAPE + ParserConfig.ARGS_COMMUNICATION,
        skip_event_types=set(_SKIPPED),
    )
    config.set_parser_backend(ParserBackend.IJSON_BATCH_AND_COMPRESS)
    config.batch_size = 20_000
    options, logger = HTAEnvOptions.instance(), logging.getLogger("hta")
    rounding, level = options.disable_ns_rounding(), logger.level
    options.set_disable_ns_rounding(True)
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            meta, table, symbols = parse_trace_dataframe(str(path), config)
    except (ijson.IncompleteJSONError, EOFError, zlib.error) as error:
        raise BadInput(
            f"trace {path}: the file is cut off or damaged ({type(error).__name__}); the profiler was ended while writing it: "
            "profile a shorter window and wait until stop_profile returns."
        ) from None
    except KeyError:  # only metadata: the columns of timed events are missing
        raise BadInput(
            f"trace {path}: it holds no timed events; was the profiler stopped before the first step?"
        ) from None
    except (ValueError, gzip.BadGzipFile, RecursionError, StopIteration) as error:
        raise BadInput(
            f"trace {path}: not a trace of the torch profiler ({str(error)[:80]}); give its .json or .json.gz."
        ) from None
    finally:
        options.set_disable_ns_rounding(rounding)
        logger.setLevel(level)
    if table.empty:
        raise BadInput(f"trace {path}: it holds no timed events; was the profiler stopped before the first step?")
    words = np.array(symbols.get_sym_table(), dtype=object)
    table = table.drop(
        columns=["index", "input_strides", "in_split_size", "out_split_size", "out_msg_nelems"], errors="ignore"
    )
    for column in ("name", "cat"):
        table[column] = pd.Categorical.from_codes(table[column].to_numpy(), categories=words)
    table["start"] = table["ts"].astype(float)
    table["end"] = table["start"] + table["dur"].astype(float)
    return meta, table.drop(columns=["ts", "dur"])


def _steps(annotations: pd.DataFrame, on_device: bool) -> pd.DataFrame:
    """Engine steps from the annotations; of those on the GPU where the trace has them (kernels run later than their launch)."""
    rows = []
    for row in annotations.itertuples():
        name = str(row.name)
        if found := _STEP_PLAIN.match(name) or _STEP.match(name):
            rows.append((row.cat, row.start, row.end, *map(int, found.groups())))
        elif _LOOP_STEP.match(name):
            rows.append((row.cat, row.start, row.end, 0, 0, 0, 0))
    columns = ["cat", "start", "end", "prefill_requests", "prefill_tokens", "requests", "tokens"]
    steps = pd.DataFrame(rows, columns=columns)
    on_gpu = steps[steps["cat"] == "gpu_user_annotation"]
    steps = on_gpu if on_device and len(on_gpu) else steps[steps["cat"] == "user_annotation"]
    return steps.drop(columns="cat").sort_values("start").reset_index(drop=True)


def _labelled(events: pd.DataFrame, backend: str) -> pd.DataFrame:
    def column(name: str, default: Any) -> pd.Series:
        return events[name] if name in events else pd.Series(default, index=events.index)

    name_codes = events["name"].cat.codes.to_numpy().astype(np.int64)
    collective_codes, collectives = pd.factorize(column("collective_name", "").fillna("").astype(str))
    codes, uniques = pd.factorize(name_codes * len(collectives) + collective_codes)
    words = events["name"].cat.categories
    labels = [names.label(words[u // len(collectives)], collectives[u % len(collectives)], backend) for u in uniques]
    kinds = list(names.KINDS)
    how = sorted({found.implementation for found in labels})
    events["kind"] = pd.Categorical.from_codes(np.array([kinds.index(f.kind) for f in labels], int)[codes], kinds)
    events["implementation"] = pd.Categorical.from_codes(
        np.array([how.index(f.implementation) for f in labels], int)[codes], how
    )
    events["fused"] = np.array([f.fused for f in labels], bool)[codes]
    events["lane"] = np.where(column("stream", -1).fillna(-1) >= 0, column("stream", -1), events["tid"])
    events["bytes"] = np.nan
    shaped = events["kind"].isin(names.COLLECTIVES) | events["name"].astype(str).str.startswith("c10d::allreduce")
    wanted = [c for c in ("in_msg_nelems", "msg_dtype", "input_dims", "input_type") if c in events]
    events.loc[shaped, "bytes"] = [_bytes(row) for row in events.loc[shaped, wanted].to_dict("records")]
    return events


def _bytes(row: dict[str, Any]) -> float:
    """Message size of a collective: NCCL's own metadata, else the largest input of the operator; NaN where neither is there."""
    count, kind = row.get("in_msg_nelems", 0), str(row.get("msg_dtype", "") or "").lower()
    if isinstance(count, (int, float)) and count > 0 and kind in _ITEM_SIZE:
        return float(count) * _ITEM_SIZE[kind]
    dims, types = row.get("input_dims"), row.get("input_type")
    if not isinstance(dims, (list, tuple)) or not isinstance(types, (list, tuple)):
        return np.nan
    sizes = [_elements(d) * _ITEM_SIZE.get(str(t).lower(), 0) for d, t in zip(dims, types, strict=False)]
    sizes = [s for s in sizes if s > 0]
    return float(max(sizes)) if sizes else np.nan


def _elements(dims: Any) -> int:
    """Number of elements of a shape, or of a list of shapes; 0 for a scalar's empty shape."""
    if not isinstance(dims, (list, tuple)) or not dims:
        return 0
    if isinstance(dims[0], (list, tuple)):
        return sum(_elements(d) for d in dims)
    return int(np.prod(dims))


def _one_thread(events: pd.DataFrame, annotations: pd.DataFrame) -> pd.DataFrame:
    """Of a CPU trace: the operators of the thread that runs the steps, and the collectives of every thread, each counted once."""
    stepping = annotations[annotations["name"].astype(str).str.match(_STEP_NAMES)]["tid"].mode()
    thread = stepping.iloc[0] if len(stepping) else events["tid"].mode().iloc[0] if len(events) else 0
    name = events["name"].astype(str)
    caller = name.str.startswith("c10d::allreduce")
    transferred = name.str.startswith("gloo:all_reduce") | name.str.contains("shm_allreduce", regex=False)
    if caller.any() and not transferred.any():  # only the caller's side was recorded: it is the AllReduce
        events.loc[caller, "kind"] = names.ALLREDUCE
        events["implementation"] = events["implementation"].cat.add_categories("c10d")
        events.loc[caller, "implementation"] = "c10d"
    return events[(events["tid"] == thread) | events["kind"].isin(names.COLLECTIVES)]
