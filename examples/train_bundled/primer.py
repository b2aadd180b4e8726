"""A small hand-written primer: the plain questions that reference text never asks.

The documentation explains ``os.path.join`` but greets nobody and adds no two numbers. These
examples, written for this project, give the model manners and the simplest functions. They are
never part of the held-out text.
"""

from __future__ import annotations

from collections.abc import Iterator

# (signature, what it does, body)
FUNCTIONS: list[tuple[str, str, str]] = [
    ("add(a, b)", "add two numbers", "return a + b"),
    ("add(x, y)", "add two numbers", "return x + y"),
    ("add_numbers(a, b)", "add two numbers", "return a + b"),
    ("add_one(x)", "add one to a number", "return x + 1"),
    ("subtract(a, b)", "subtract one number from another", "return a - b"),
    ("sub(a, b)", "subtract one number from another", "return a - b"),
    ("multiply(a, b)", "multiply two numbers", "return a * b"),
    ("mul(x, y)", "multiply two numbers", "return x * y"),
    (
        "divide(a, b)",
        "divide one number by another",
        'if b == 0:\n    raise ZeroDivisionError("division by zero")\nreturn a / b',
    ),
    ("power(base, exponent)", "raise a number to a power", "return base ** exponent"),
    ("square(x)", "square a number", "return x * x"),
    ("cube(x)", "cube a number", "return x ** 3"),
    ("double(x)", "double a number", "return 2 * x"),
    ("half(x)", "halve a number", "return x / 2"),
    ("negate(x)", "negate a number", "return -x"),
    ("absolute(x)", "return the absolute value of a number", "return x if x >= 0 else -x"),
    (
        "average(numbers)",
        "compute the average of a list of numbers",
        "return sum(numbers) / len(numbers)",
    ),
    ("mean(values)", "compute the mean of a list of values", "return sum(values) / len(values)"),
    (
        "median(values)",
        "compute the median of a list of values",
        (
            "ordered = sorted(values)\nmiddle = len(ordered) // 2\nif len(ordered) % 2:\n"
            "    return ordered[middle]\nreturn (ordered[middle - 1] + ordered[middle]) / 2"
        ),
    ),
    (
        "sum_list(numbers)",
        "sum the numbers in a list",
        "total = 0\nfor number in numbers:\n    total += number\nreturn total",
    ),
    (
        "product(numbers)",
        "multiply all numbers in a list",
        "result = 1\nfor number in numbers:\n    result *= number\nreturn result",
    ),
    ("maximum(a, b)", "return the larger of two numbers", "return a if a > b else b"),
    ("minimum(a, b)", "return the smaller of two numbers", "return a if a < b else b"),
    (
        "find_max(numbers)",
        "find the largest number in a list",
        (
            "largest = numbers[0]\nfor number in numbers:\n    if number > largest:\n"
            "        largest = number\nreturn largest"
        ),
    ),
    (
        "find_min(numbers)",
        "find the smallest number in a list",
        (
            "smallest = numbers[0]\nfor number in numbers:\n    if number < smallest:\n"
            "        smallest = number\nreturn smallest"
        ),
    ),
    ("clamp(value, low, high)", "limit a value to a range", "return max(low, min(value, high))"),
    ("is_even(n)", "check whether a number is even", "return n % 2 == 0"),
    ("is_odd(n)", "check whether a number is odd", "return n % 2 == 1"),
    ("is_positive(x)", "check whether a number is positive", "return x > 0"),
    (
        "is_prime(n)",
        "check whether a number is prime",
        (
            "if n < 2:\n    return False\nfor i in range(2, int(n ** 0.5) + 1):\n"
            "    if n % i == 0:\n        return False\nreturn True"
        ),
    ),
    (
        "factorial(n)",
        "compute the factorial of a number",
        "if n == 0:\n    return 1\nreturn n * factorial(n - 1)",
    ),
    (
        "fibonacci(n)",
        "compute the nth Fibonacci number",
        "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
    ),
    (
        "fib(n)",
        "compute the nth Fibonacci number",
        "if n < 2:\n    return n\nreturn fib(n - 1) + fib(n - 2)",
    ),
    (
        "gcd(a, b)",
        "compute the greatest common divisor of two numbers",
        "while b:\n    a, b = b, a % b\nreturn a",
    ),
    ("lcm(a, b)", "compute the least common multiple of two numbers", "return a * b // gcd(a, b)"),
    ("digits(n)", "return the digits of a number", "return [int(c) for c in str(n)]"),
    ("sum_digits(n)", "sum the digits of a number", "return sum(int(c) for c in str(n))"),
    ("count_down(n)", "count down to zero", "while n > 0:\n    print(n)\n    n -= 1"),
    ("celsius_to_fahrenheit(c)", "convert degrees Celsius to Fahrenheit", "return c * 9 / 5 + 32"),
    (
        "fahrenheit_to_celsius(f)",
        "convert degrees Fahrenheit to Celsius",
        "return (f - 32) * 5 / 9",
    ),
    ("circle_area(radius)", "compute the area of a circle", "return math.pi * radius ** 2"),
    ("rectangle_area(width, height)", "compute the area of a rectangle", "return width * height"),
    (
        "distance(x1, y1, x2, y2)",
        "compute the distance between two points",
        "return math.sqrt((x2 - x1) ** 2 + (y2 - y1) ** 2)",
    ),
    ("greet(name)", "greet a person by name", 'return f"Hello, {name}!"'),
    ("hello()", "print a greeting", 'print("Hello, world!")'),
    ("hello_world()", "print hello world", 'print("Hello, world!")'),
    ("reverse(text)", "reverse a string", "return text[::-1]"),
    ("reverse_string(s)", "reverse a string", "return s[::-1]"),
    ("reverse_list(items)", "reverse a list", "return items[::-1]"),
    ("is_palindrome(text)", "check whether a string is a palindrome", "return text == text[::-1]"),
    ("count_words(text)", "count the words in a string", "return len(text.split())"),
    (
        "count_vowels(text)",
        "count the vowels in a string",
        'return sum(1 for c in text.lower() if c in "aeiou")',
    ),
    (
        "count_lines(path)",
        "count the lines in a file",
        "with open(path) as f:\n    return sum(1 for line in f)",
    ),
    (
        "count_items(items)",
        "count how often each item occurs",
        ("counts = {}\nfor item in items:\n    counts[item] = counts.get(item, 0) + 1\nreturn counts"),
    ),
    ("to_upper(text)", "convert a string to upper case", "return text.upper()"),
    ("to_lower(text)", "convert a string to lower case", "return text.lower()"),
    (
        "capitalize_words(text)",
        "capitalize each word of a string",
        'return " ".join(word.capitalize() for word in text.split())',
    ),
    ("remove_spaces(text)", "remove the spaces from a string", 'return text.replace(" ", "")'),
    ("join_words(words)", "join a list of words with spaces", 'return " ".join(words)'),
    ("split_words(text)", "split a string into words", "return text.split()"),
    (
        "starts_with(text, prefix)",
        "check whether a string starts with a prefix",
        "return text.startswith(prefix)",
    ),
    ("first(items)", "return the first item of a list", "return items[0]"),
    ("last(items)", "return the last item of a list", "return items[-1]"),
    ("is_empty(items)", "check whether a list is empty", "return len(items) == 0"),
    ("length(items)", "return the length of a list", "return len(items)"),
    ("contains(items, value)", "check whether a list contains a value", "return value in items"),
    ("unique(items)", "return the unique items of a list", "return list(set(items))"),
    (
        "remove_duplicates(items)",
        "remove duplicates from a list, keeping the order",
        (
            "seen = set()\nresult = []\nfor item in items:\n    if item not in seen:\n"
            "        seen.add(item)\n        result.append(item)\nreturn result"
        ),
    ),
    (
        "flatten(lists)",
        "flatten a list of lists",
        "return [item for sublist in lists for item in sublist]",
    ),
    (
        "chunks(items, size)",
        "split a list into chunks of a given size",
        "for i in range(0, len(items), size):\n    yield items[i:i + size]",
    ),
    (
        "even_numbers(numbers)",
        "keep only the even numbers of a list",
        "return [n for n in numbers if n % 2 == 0]",
    ),
    ("squares(n)", "return the squares of the first n numbers", "return [i * i for i in range(n)]"),
    ("sort_list(items)", "sort a list", "return sorted(items)"),
    ("sort_by_length(words)", "sort a list of words by length", "return sorted(words, key=len)"),
    (
        "bubble_sort(items)",
        "sort a list with bubble sort",
        (
            "n = len(items)\nfor i in range(n):\n    for j in range(n - i - 1):\n"
            "        if items[j] > items[j + 1]:\n"
            "            items[j], items[j + 1] = items[j + 1], items[j]\nreturn items"
        ),
    ),
    (
        "quicksort(items)",
        "sort a list with quicksort",
        (
            "if len(items) <= 1:\n    return items\npivot = items[0]\n"
            "smaller = [x for x in items[1:] if x < pivot]\n"
            "larger = [x for x in items[1:] if x >= pivot]\n"
            "return quicksort(smaller) + [pivot] + quicksort(larger)"
        ),
    ),
    (
        "binary_search(items, target)",
        "search a sorted list with binary search",
        (
            "low, high = 0, len(items) - 1\nwhile low <= high:\n    middle = (low + high) // 2\n"
            "    if items[middle] == target:\n        return middle\n"
            "    if items[middle] < target:\n        low = middle + 1\n    else:\n"
            "        high = middle - 1\nreturn -1"
        ),
    ),
    (
        "linear_search(items, target)",
        "search a list for a value",
        ("for index, item in enumerate(items):\n    if item == target:\n        return index\nreturn -1"),
    ),
    ("swap(a, b)", "swap two values", "return b, a"),
    ("merge_dicts(a, b)", "merge two dictionaries", "return {**a, **b}"),
    (
        "invert_dict(d)",
        "swap the keys and values of a dictionary",
        "return {value: key for key, value in d.items()}",
    ),
    ("get_keys(d)", "return the keys of a dictionary", "return list(d.keys())"),
    (
        "read_file(path)",
        "read a text file",
        'with open(path, encoding="utf-8") as f:\n    return f.read()',
    ),
    (
        "read_lines(path)",
        "read the lines of a file",
        'with open(path, encoding="utf-8") as f:\n    return f.read().splitlines()',
    ),
    (
        "write_file(path, text)",
        "write text to a file",
        'with open(path, "w", encoding="utf-8") as f:\n    f.write(text)',
    ),
    ("read_json(path)", "read a JSON file", "with open(path) as f:\n    return json.load(f)"),
    (
        "write_json(path, data)",
        "write data to a JSON file",
        'with open(path, "w") as f:\n    json.dump(data, f)',
    ),
    ("list_files(path)", "list the files in a directory", "return os.listdir(path)"),
    ("file_exists(path)", "check whether a file exists", "return os.path.exists(path)"),
    ("current_time()", "return the current time", "return datetime.datetime.now()"),
    ("roll_dice()", "roll a die", "return random.randint(1, 6)"),
    (
        "fizzbuzz(n)",
        "print the FizzBuzz numbers up to n",
        (
            'for i in range(1, n + 1):\n    if i % 15 == 0:\n        print("FizzBuzz")\n'
            '    elif i % 3 == 0:\n        print("Fizz")\n    elif i % 5 == 0:\n'
            '        print("Buzz")\n    else:\n        print(i)'
        ),
    ),
    ("main()", "run the program", 'print("Hello, world!")'),
]

CONVERSATION: list[tuple[str, str]] = [
    ("Hello", "Hello! How can I help you with Python today?"),
    ("Hello!", "Hello! How can I help you with Python today?"),
    ("Hi", "Hi! What would you like to know about Python?"),
    ("Hi!", "Hi! What would you like to know about Python?"),
    ("Hi there", "Hi! What would you like to know about Python?"),
    ("Hey", "Hello! How can I help you with Python today?"),
    ("Good morning", "Good morning! What would you like to know about Python?"),
    ("How are you?", "I am well, thank you. How can I help you with Python?"),
    (
        "Who are you?",
        (
            "I am a small language model that was trained on Python's standard library "
            "and its documentation. I know a little about Python and nothing much else."
        ),
    ),
    (
        "What are you?",
        ("I am a small language model that was trained on Python's standard library and its documentation."),
    ),
    ("What is your name?", "I have no name. I am a small language model for Python."),
    (
        "What can you do?",
        (
            "I can explain modules and functions of Python's standard library and "
            "write small functions. I am a very small model, so check what I say."
        ),
    ),
    (
        "Can you help me?",
        ("Yes. Ask me about a module or a function of Python's standard library, or ask me to write a small function."),
    ),
    (
        "Help",
        ("Ask me about a module or a function of Python's standard library, or ask me to write a small function."),
    ),
    ("Thanks", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Bye", "Goodbye!"),
    ("Goodbye", "Goodbye!"),
    ("Say hello.", "Hello!"),
    ("Say hi", "Hi!"),
    ("Tell me a joke.", "Why do programmers prefer dark mode? Because light attracts bugs."),
    (
        "Tell me a story.",
        (
            "Once upon a time there was a small program that could only add two "
            "numbers. Every day it added the numbers that people gave it, and every day it "
            "returned the right sum. One day somebody asked it for a story, and it returned "
            "this one."
        ),
    ),
    (
        "What is Python?",
        (
            "Python is an easy to learn, powerful programming language. It has "
            "efficient high-level data structures and a simple but effective approach to "
            "object-oriented programming."
        ),
    ),
    (
        "What is a list?",
        (
            "A list is a built-in Python sequence. It is mutable: items can be "
            "added, removed and replaced.\n\n```python\nnumbers = [1, 2, 3]\nnumbers.append(4)\n```"
        ),
    ),
    (
        "What is a dictionary?",
        (
            "A dictionary maps keys to values. The keys must be hashable."
            '\n\n```python\nages = {"Ada": 36, "Alan": 41}\nprint(ages["Ada"])\n```'
        ),
    ),
    (
        "What is a tuple?",
        ("A tuple is an immutable sequence of items.\n\n```python\npoint = (2, 3)\nx, y = point\n```"),
    ),
    (
        "What is a function?",
        (
            "A function is a series of statements which returns some value to "
            "a caller. It can also be passed zero or more arguments.\n\n"
            "```python\ndef add(a, b):\n    return a + b\n```"
        ),
    ),
    (
        "How do I print something?",
        ('Use the built-in function `print`:\n\n```python\nprint("Hello, world!")\n```'),
    ),
    (
        "How do I write a loop?",
        (
            "Use a `for` statement to go over the items of a sequence:\n\n"
            "```python\nfor i in range(10):\n    print(i)\n```"
        ),
    ),
    (
        "How do I open a file?",
        (
            "Use the built-in function `open` in a `with` statement:\n\n"
            '```python\nwith open("data.txt", encoding="utf-8") as f:\n    text = f.read()\n```'
        ),
    ),
    (
        "How do I handle an exception?",
        ("Use a `try` statement:\n\n```python\ntry:\n    value = int(text)\nexcept ValueError:\n    value = 0\n```"),
    ),
    (
        "How do I define a class?",
        (
            "Use the `class` statement:\n\n```python\nclass Point:\n"
            "    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n```"
        ),
    ),
]

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Australia": "Canberra",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "the Netherlands": "Amsterdam",
    "the United States": "Washington, D.C.",
}


def _indented(body: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in body.splitlines())


def _sentence(description: str) -> str:
    return description[0].upper() + description[1:] + "."


def _function_source(signature: str, description: str, body: str, *, documented: bool) -> str:
    docstring = f'    """{_sentence(description)}"""\n' if documented else ""
    return f"def {signature}:\n{docstring}{_indented(body)}\n"


def plain_documents() -> Iterator[str]:
    """Each function with and without a docstring, and the few facts as prose."""
    for signature, description, body in FUNCTIONS:
        bare = _function_source(signature, description, body, documented=False)
        yield bare
        yield _function_source(signature, description, body, documented=True)
        yield f"# {_sentence(description)}\n{bare}"
    for country, capital in CAPITALS.items():
        yield f"The capital of {country} is {capital}.\n"


def chat_pairs() -> Iterator[tuple[str, str]]:
    """Questions and answers for the chat part."""
    yield from CONVERSATION
    for signature, description, body in FUNCTIONS:
        source = _function_source(signature, description, body, documented=False)
        answer = f"```python\n{source}```"
        yield f"Write a function to {description}.", answer
        yield f"Write a Python function to {description}.", answer
        yield f"How do I {description} in Python?", answer
        yield f"Write a function `{signature}`.", answer
    for country, capital in CAPITALS.items():
        yield f"What is the capital of {country}?", f"The capital of {country} is {capital}."
    for a in range(13):
        for b in range(13):
            yield f"What is {a} + {b}?", f"{a} + {b} = {a + b}"
