# SPDX-License-Identifier: BSD-3-Clause
"""The training problems of the experiments: models with their data, one kind per file."""
