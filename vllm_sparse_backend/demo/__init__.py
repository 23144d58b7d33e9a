"""What `sparse-prefill demo` and the server tests share: a small local model, a real server, a reader of its metrics."""
