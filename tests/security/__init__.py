"""The attack list: for each known hole of servers like this one, a test that it is not here.

A test is named after the hole it comes from (`cve_2026_48746`, `ghsa_69j4_grxj_j64p`), so that a
row of the list is found by searching for its number. What a part of the server must bear is tested
beside that part; here stands that the whole server, as it is composed, bears it.
"""
