"""``mindnlp-dp report``: one page, and one picture, from the report.json of one or several runs."""
