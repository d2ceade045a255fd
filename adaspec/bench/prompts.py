"""Ten prompts of our own: chat, quoting, code and mathematics."""

NOTICE = (
    "The swimming pool will be closed from Monday 3 March to Friday 14 March while the heating is replaced. "
    "Swimming lessons move to the Riverside Centre, which is ten minutes away on bus 12. Annual members get two weeks "
    "added to their membership. The sauna and the gym stay open as usual, from seven in the morning to nine at night."
)
TABLE = (
    "name,city,age\nAda Brown,London,36\nBen Carter,Leeds,41\nChloe Davis,Bristol,29\nDan Evans,Cardiff,52\n"
    "Ella Fox,Oxford,33\nFinn Gray,York,47\n"
)
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""
TEN: tuple[tuple[str, str], ...] = (
    ("chat", "Write a haiku about rivers"),
    ("chat", "My neighbour plays loud music every night. How can I talk to him about it without a quarrel?"),
    ("chat", "Explain to a ten-year-old why the sky is blue."),
    ("quoting", f"Repeat this notice word for word: '{NOTICE}'"),
    ("quoting", f"Copy this table exactly, then copy it a second time:\n\n{TABLE}"),
    ("quoting", f"Here is a class:\n\n{CODE}\nWrite the same class again, unchanged, under the name Pile."),
    ("code", "Write a Python function that checks whether a number is prime, with a docstring and three examples."),
    ("code", "Write an SQL table for customers and one for their orders, then a query for the ten best customers."),
    (
        "maths",
        "A train travels 180 km in 2 hours and then 120 km in 1.5 hours. What is its average speed? Show the steps.",
    ),
    ("maths", "Write the multiplication table of 7 from 7 x 1 to 7 x 12, one line each."),
)
