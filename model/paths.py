"""Which of several equal ways a part of the model took in this process; a result names them."""

# By what is computed, how. Noted by the code that runs, not by the one that decides.
taken: dict[str, str] = {}
