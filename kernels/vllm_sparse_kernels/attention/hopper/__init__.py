# SPDX-License-Identifier: Apache-2.0
"""Engine `hopper`: a persistent Gluon kernel with a scheduler, producers and consumers (sm_90)."""
