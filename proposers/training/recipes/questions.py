"""Questions as people ask them, for `train-draft --questions`: what a target answers is trained on.

Forms times subjects, in a fixed shuffled order; none of them is a prompt of `profiles/prompts`.
`python -m proposers.training.recipes.questions COUNT` prints the first COUNT of them, a line each.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

# A form's braces name the list of subjects that goes there.
FORMS = """
What is {thing}?
What is {thing} and why does it matter?
Explain {thing} in simple words.
Explain {thing} to a child.
Give me three facts about {thing}.
What does {thing} mean? Give an example.
Summarize what is known about {thing} in four sentences.
How does {machine} work?
Explain how {machine} works.
Who invented {machine}, and what was used before?
What should I know before I buy {machine}?
Why {why}?
Can you tell me why {why}?
How can I {do}?
How do I {do}?
What is the best way to {do}?
Give me five tips to {do}.
List four things that I need to {do}.
I want to {do}. Where should I start?
I would like to {do}, but I have little time. What do you suggest?
What mistakes do people make when they {do}?
What is the difference between {pair}?
Compare {pair} in a few sentences.
Which is better, {pair}? Explain your choice.
List the advantages and disadvantages of {choice}.
Give three reasons for and three against {choice}.
Write a short paragraph about {choice}.
Is {choice} a good idea?
Write a short story about {hero}.
Tell a story about {hero} in five sentences.
Write a poem about {theme}.
Write a haiku about {theme}.
Describe {theme} to somebody who has never seen it.
Write the first lines of a novel about {hero}.
Write an e-mail to {person} about {matter}.
Write a short letter to {person} about {matter}.
Draft a polite message to {person} concerning {matter}.
Give me a recipe for {dish}.
How do you cook {dish}?
What can I eat with {dish}?
{trouble} What should I do?
{trouble} Can you help me?
{trouble} What could be the reason?
What were the consequences of {history}?
When was {history}, and who took part?
Tell me about {history}.
Write a Python function that {code}.
Write a program in Python that {code} and explain it.
How do I write code that {code}?
Describe the daily work of {job}.
What does it take to become {job}?
Give me five interview questions for {job}.
Name five {kind} and describe each in one sentence.
What are the most famous {kind}?
Which {kind} would you recommend, and why?
What should I see in {place}?
Plan a weekend in {place} for two people.
What is {place} known for?
What is the weather like in {place} in spring?
"""

SUBJECTS = {
    "thing": """
gravity|photosynthesis|inflation|democracy|evolution|a black hole|the water cycle|a balanced diet
an ecosystem|electricity|the stock market|artificial intelligence|a metaphor|the immune system
global warming|a mortgage|plate tectonics|a hypothesis|insulin|the speed of light|a budget
supply and demand|a healthy sleep rhythm|the greenhouse effect|an algorithm|a database
machine learning|cholesterol|a constitution|biodiversity|meditation|the solar system|a volcano
an eclipse|friction|a vitamin|human rights|a pension|recycling|a leap year|the food chain
blood pressure|an atom|sound|a rainbow|osmosis|natural selection|capitalism|the scientific method
an enzyme|probability|a prime number|the Pythagorean theorem|a fossil|the ozone layer
fermentation|a glacier|a tsunami|photography|jazz|impressionism|yoga|empathy|procrastination
a startup|an interest rate|public transport|renewable energy|a coral reef|the Internet of Things
open-source software|encryption|a firewall|cloud computing|a variable""",
    "machine": """
a microwave oven|a vacuum cleaner|a camera|a steam engine|an electric car|a solar panel
a wind turbine|a washing machine|a telescope|a printer|a microscope|a radio|a smartphone|a clock
a parachute|an elevator|a submarine|a helicopter|a battery|a light bulb|a compass
a coffee machine|a sewing machine|a piano|a thermometer|a loudspeaker|a hearing aid
a traffic light|an air conditioner|a heat pump|a 3D printer|a drone""",
    "why": """
do cats purr|is the sea salty|do we dream|do birds migrate|does bread rise|do we yawn
is the ocean blue|do stars twinkle|does ice float on water|do people laugh|does iron rust
do dogs wag their tails|is exercise good for us|do we need sleep|does hair turn grey
does metal feel cold|do onions make us cry|does the moon change its shape|do some people snore
are bees important|is biting into a lemon sour|do tides exist|do we have seasons
do plants need light|does music change our mood|do earthquakes happen|do languages change
do prices rise|do computers crash|does honey last so long|do mosquitoes bite
do bears sleep in winter|is reading good for children|do people vote
do airplanes leave white trails""",
    "do": """
grow tomatoes on a balcony|save money every month|learn a new language|write a good resume
sleep better|train a puppy|start a blog|bake bread|remove a coffee stain|prepare for an exam
run a marathon|find new friends in a new city|paint a room|read more books|eat less sugar
fix a flat tire|organize a birthday party|take better photographs|give a speech
stop biting my nails|lose weight slowly|plan a garden|repair a dripping tap
learn to swim as an adult|improve my memory|keep houseplants alive|choose a good mattress
build a bookshelf|drink more water|become more patient|clean a wooden floor
negotiate a higher salary|teach a child to read|make my own candles|use less plastic
play chess well|sing in tune|pack a suitcase|care for an old dog|write a short story|sell my car
knit a scarf|wake up early|concentrate at work|cook for many guests|keep my passwords safe
back up my photos|reduce stress at work|insulate an old house|draw a portrait
make new habits last|start jogging""",
    "pair": """
butter and margarine|a crocodile and an alligator|weather and climate|a comet and an asteroid
coffee and tea|cats and dogs|an island and a peninsula|cities and villages
a novel and a short story|jogging and swimming|gas and electric stoves|frogs and toads
a loan and a lease|renting and buying a home|a democracy and a monarchy
summer and winter holidays|e-books and paper books|RAM and a hard disk|mass and weight
a simile and a metaphor|a psychologist and a psychiatrist|arteries and veins|a cold and the flu
mammals and reptiles|baking soda and baking powder|Python and Java|a list and a tuple
television and radio|cheese and yoghurt|oil paint and watercolour|debit and credit cards
moths and butterflies""",
    "choice": """
working from home|school uniforms|a four-day working week|owning a pet|living in a big city
eating meat|online shopping|nuclear power|tourism|social media for teenagers|learning Latin
free public transport|zoos|video games|studying abroad|living alone|fasting
buying second-hand clothes|getting up before sunrise|keeping a diary|sharing a flat
taking a year off after school|mobile phones in class|paying in cash|growing your own food""",
    "hero": """
an old clockmaker|a fox who could not sleep|a girl who found a map|two brothers in a desert
a robot that learns to cook|a shy dragon|a lost letter|a taxi driver in Paris
a teacher on her last day|a boy and his kite|a cat in a library|a detective without a case
an astronaut who misses rain|a gardener and a stubborn rose|a train that never stops
a violin maker|a village without a name|a fisherman and the moon|a queen who hated gold
a postman in the mountains|twins who swap places|a ghost who is afraid of people
a dog that waits at a station|a painter who lost his colours""",
    "theme": """
the sea at night|an empty street|the smell of rain|my grandmother's kitchen|a train journey
the first day of spring|an old tree|a thunderstorm|friendship|a winter morning
the city after midnight|a river|autumn|a market in the morning|silence|a long road|the desert
a candle|hope|a mountain lake|a harbour""",
    "person": """
my boss|a colleague|my teacher|a hotel|my grandmother|the town council|a customer|my bank
an old friend|the school director|my insurance company|a shop|my doctor|our team|the airline
a future employer|my roommate|a publisher|my cousin|the library""",
    "matter": """
a delayed delivery|a day off next week|a wrong invoice|a meeting that must be moved|a lost bag
a birthday party|a noisy construction site|a job offer|a missed appointment
the plan for the summer|a refund|a reservation for four people|a broken window
a thank-you for help|a change of address|a new project""",
    "dish": """
tomato soup|fried rice|apple pie|lentil curry|a Greek salad|chicken stew|banana bread
mushroom risotto|potato salad|vegetable lasagna|an omelette|chocolate cookies|roasted pumpkin
fish tacos|a bean chili|onion soup|pizza dough|noodles with peanut sauce|rice pudding
stuffed peppers|a lemon cake""",
    "trouble": """
My phone does not charge any more.|I cannot fall asleep at night.|My plants have yellow leaves.
I forgot the password of my computer.|My car makes a strange noise when I brake.
I have an argument with my best friend.|My son does not want to do his homework.
I feel tired all day.|My bread never rises.|I spend too much money.
The printer prints empty pages.|My neighbour's dog barks all night.|I am afraid of flying.
I have to give a presentation on Monday.|My bicycle chain falls off again and again.
I do not know what to study.|My back hurts after work.|The Internet connection at home is slow.
I was not invited to a party.|My cat does not eat.|I always come late.
I have lost my wallet in a bus.|My soup is too salty.|There are ants in my kitchen.
I cannot remember names.|My program prints an error that I do not understand.""",
    "history": """
the French Revolution|the fall of the Roman Empire|the invention of printing
the Industrial Revolution|the discovery of America|the Black Death|the American Civil War
the Cold War|the moon landing|the fall of the Berlin Wall|the Great Depression|the Renaissance
the Silk Road|the Second World War|the building of the pyramids|the Battle of Waterloo
the independence of India|the Boston Tea Party|the Olympic Games of antiquity""",
    "code": """
reverses a string|counts the words in a text|checks whether a number is prime
sorts a list of names|computes the average of a list|reads a file line by line
finds the longest word in a sentence|removes duplicates from a list
computes the factorial of a number|converts Celsius to Fahrenheit|merges two dictionaries
prints the multiplication table|checks whether a word is a palindrome
counts the vowels in a string|finds the smallest number in a list|computes Fibonacci numbers
draws a triangle of stars|simulates the roll of two dice|sums the digits of a number
flattens a nested list""",
    "job": """
a nurse|a software developer|a carpenter|a firefighter|a librarian|a pilot|a farmer|a journalist
a chef|an architect|a veterinarian|a teacher|a photographer|an electrician|a translator
a police officer|a dentist|a gardener|a scientist|a project manager|a florist|a train driver""",
    "kind": """
rivers in Europe|musical instruments|kinds of cheese|board games|breeds of dogs|painters|planets
programming languages|spices|dances|flowers for a shady garden|healthy breakfasts|winter sports
films for children|books about travel|desserts|animals of the rain forest
inventions of the twentieth century|deserts""",
    "place": """
Rome|Kyoto|New York|Istanbul|Lisbon|Vienna|Cairo|Sydney|Amsterdam|Mexico City|Prague|Iceland
Scotland|Morocco|Peru|Norway|Barcelona|Berlin|Edinburgh""",
}


def questions(seed: int = 0) -> Iterator[str]:
    """All of them, each once: a round takes one question of every form, as long as it has any."""
    rng = random.Random(seed)
    left = [rng.sample(filled, len(filled)) for filled in map(_fill, FORMS.strip().splitlines())]
    while left:
        yield from [form.pop() for form in rng.sample(left, len(left))]
        left = [form for form in left if form]


def _fill(form: str) -> list[str]:
    """The form with every subject that its braces name."""
    filled = [form]
    for name, subjects in SUBJECTS.items():
        if "{" + name + "}" in form:
            listed = [one for line in subjects.split("\n") for one in line.split("|") if one]
            filled = [text.replace("{" + name + "}", one) for text in filled for one in listed]
    return [text[:1].upper() + text[1:] for text in filled]


if __name__ == "__main__":
    for _, question in zip(range(int(sys.argv[1])), questions(), strict=False):
        print(question)
