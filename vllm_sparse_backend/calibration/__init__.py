# SPDX-License-Identifier: Apache-2.0
"""Offline calibration of profiles: measures each head on prompts and chooses its method and parameters."""
