"""Worker extension for a profiled engine: the trace alone is wanted, not the tables that vLLM makes of it at the window's end."""


class TraceOnly:
    """Mixed into vLLM's worker by name."""

    def kimi_eagle_trace_only(self) -> None:
        """Leave out the profiler's tables: on a CPU they take longer than the window itself, in every rank."""
        for name in ("dump_cpu_time_total", "dump_device_time_total"):
            if hasattr(getattr(self, "profiler", None), name):
                setattr(self.profiler, name, False)
