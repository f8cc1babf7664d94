"""Configurations of ColossalAI, Cornstarch and MindFormers, read as data and said in fields of ours. Imports no torch.

One table a system says what becomes of each of its knobs; `conversion` says which table a configuration is for.
"""
