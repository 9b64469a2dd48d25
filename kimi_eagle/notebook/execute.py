"""One notebook in one process: `python -m kimi_eagle.notebook.execute SPEC.json`, started by the runner.

A process of its own because papermill changes the working directory of the whole process, because its false "completed" marks
after a dead kernel must be judged from outside, and because ending it ends the kernel.
"""

import json
import logging
import sys
from pathlib import Path

# Exit codes that the runner tells apart; 138 is papermill's own for a dead kernel.
NOTEBOOK_ERROR = 1
DEAD_KERNEL = 138


def main(spec_file: str) -> int:
    """Execute the notebook that the JSON file `spec_file` describes and return the exit code.

    The spec: {notebook, output, parameters, cwd}. Cell marks and output text go to standard output, line by line.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    try:
        papermill.execute_notebook(
            spec["notebook"],
            spec["output"],
            parameters=spec["parameters"],
            kernel_name="python3",
            language="python",
            cwd=spec["cwd"],
            progress_bar=False,
            log_output=True,
            start_timeout=300,  # a kernel on a loaded machine; the default 60 s was seen to be too short
            iopub_timeout=120,  # the default 4 s of silence loses the end of a chatty cell
        )
    except PapermillExecutionError as error:
        _print_error(error.ename, error.evalue)
        return NOTEBOOK_ERROR
    except (DeadKernelError, CellTimeoutError) as error:
        _print_error(type(error).__name__, str(error))
        return DEAD_KERNEL
    return 0


def _print_error(name: str, text: str) -> None:
    """The one line that the runner looks for; JSON, so that a text of several lines stays one."""
    print("kimi-eagle-error " + json.dumps({"name": name, "text": text}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
