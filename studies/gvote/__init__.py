"""GVote's premise and its numbers: are drawn queries like those to come, and what do p, S and n_f buy?"""
