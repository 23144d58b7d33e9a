# SPDX-License-Identifier: Apache-2.0
"""What `sparse-prefill demo` and the server tests share: a small model, a real server, a reader of its metrics."""
