"""The attack list: for each known vulnerability of similar servers, a test that this one is safe.

A test is named after its vulnerability (`cve_2026_48746`, `ghsa_69j4_grxj_j64p`), so that it is
found by searching for the number. The parts of the server are tested on their own elsewhere; these
tests attack the whole application.
"""
