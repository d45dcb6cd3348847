"""The operator's tool: `python -m whalez.admin`, also `whalez admin`. Asks every rank at once and shows what they say.

asking.py     which ranks there are, one deadline     commands.py    what a user types
views.py      answers -> rows                         whales.py      the ranks' lives of one whale -> one life
bundle.py     `dump`                                  postmortem.py  the files of a failure -> its first cause
launches.py   trace files -> launches
"""
