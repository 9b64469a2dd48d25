"""Hidden states out of a real vLLM engine: the engine process, the back ends, the loop and the proof."""
