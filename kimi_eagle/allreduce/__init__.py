"""What share of a decode step is AllReduce: capture a window, break it down per rank, measure latency against size."""
