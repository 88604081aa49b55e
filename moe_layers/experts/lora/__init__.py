"""Low-rank adapters of the experts: settings and parameters, dropout, merging."""
