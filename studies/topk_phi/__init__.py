"""What a selection with a completed tail costs: the budgets of its tables, and where its time goes."""
