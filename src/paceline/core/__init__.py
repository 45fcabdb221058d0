# SPDX-License-Identifier: BSD-3-Clause
"""The decision core: pure, and based on the standard library only.

Read the modules in this order: `events` (what goes in and comes out), `ledger` (the state),
`policy` (the questions that a rule answers), `decider` (who asks them), then any file of
`policies`.
"""
