# SPDX-License-Identifier: Apache-2.0
"""Engine `portable`: one Triton kernel that runs wherever Triton does and has every option."""
