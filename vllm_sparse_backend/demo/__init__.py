# SPDX-License-Identifier: Apache-2.0
"""The demo, and its parts that server tests share: a small model and its questions."""
