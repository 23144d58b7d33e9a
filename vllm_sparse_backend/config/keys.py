# SPDX-License-Identifier: Apache-2.0
"""The option and the keys under which settings travel between processes.

They are separate from the modules that read the settings, because every process needs the names.
"""

OPTION = "--additional-config"
KEY = "sparse_prefill"
"""Key of the settings, within ``OPTION``."""
DOCUMENTS = "sparse_prefill_documents"
"""Key next to ``KEY`` that carries the texts of named files to the server's other processes (``source_files.py``)."""
DEVICE = "sparse_prefill_device"
"""Key next to ``KEY`` that carries the device for which the first process resolved ``auto``."""
STREAMING = "sparse_prefill_streaming_heads"
"""Key next to ``KEY`` that carries whether the server finds streaming heads, which its first process decides."""
