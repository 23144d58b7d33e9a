# SPDX-License-Identifier: Apache-2.0
"""Engine `hopper`: a persistent Gluon kernel with one producer and two consumer groups (sm_90)."""
