# SPDX-License-Identifier: BSD-3-Clause
"""Analysis of traces, of simulated and real runs alike: numbers, reports and figures."""
