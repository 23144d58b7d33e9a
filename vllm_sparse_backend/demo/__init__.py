# SPDX-License-Identifier: Apache-2.0
"""The demo, with a small model and questions that the server tests also use."""
