# SPDX-License-Identifier: Apache-2.0
"""The option and the keys under which settings travel, apart from what reads them: every process knows these."""

OPTION = "--additional-config"
KEY = "sparse_prefill"
"""What an operator sets, within ``OPTION``."""
DOCUMENTS = "sparse_prefill_documents"
"""Beside it, where the server's processes find the files that it names (``documents``)."""
DEVICE = "sparse_prefill_device"
"""And the device for which the first of them looked ``auto`` up."""
