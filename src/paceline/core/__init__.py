# SPDX-License-Identifier: BSD-3-Clause
"""The decision core: pure, standard library only.

Read in this order: `events` (what goes in and comes out), `ledger` (what is known), `policy` (what
rules are asked), `decider` (how they are put to work), then any file of `policies`.
"""
