# SPDX-License-Identifier: Apache-2.0
"""Profiles from files that other tools saved: one module for each form, none of which executes what it reads."""
