# SPDX-License-Identifier: Apache-2.0
"""healthcheck.py PORT: exit 0 if a server on this machine answers /health on PORT, else 1."""

import sys
import urllib.request

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    direct.open(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=4).close()
except OSError as error:
    sys.exit(f"no answer from /health on port {sys.argv[1]}: {error}")
