# SPDX-License-Identifier: Apache-2.0
"""What tests, calibration and evaluation share: random paged batches, random indices, error budgets, the oracle."""
