"""One module per step: `check(table, device, folder)` adds the rows of the step to the table."""
