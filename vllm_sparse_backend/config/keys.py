# SPDX-License-Identifier: Apache-2.0
"""The option and the keys under which settings travel between processes.

They are separate from the modules that read the settings, because every process needs the names.
"""

OPTION = "--additional-config"
KEY = "sparse_prefill"
"""Key of the settings, within ``OPTION``."""
SETTINGS = f"{OPTION} {KEY}"
"""How messages name the settings."""
CARRIED = "sparse_prefill_carried"
"""Key next to ``KEY`` of what the first process of a server read and decided for its other processes."""
