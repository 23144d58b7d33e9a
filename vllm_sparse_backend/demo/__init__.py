# SPDX-License-Identifier: Apache-2.0
"""The demo, and the small model that tests of servers also use."""
