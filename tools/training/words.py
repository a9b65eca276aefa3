"""Words of the synthetic dialogues: fixed lists, and makers of names, codes and nonsense with a held-out part.

A value is held out when a checksum of it says so; training never sees such a value, the tests use nothing else. So a
right answer about one can only have been copied from where it was told.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

__all__ = [
    "ADJECTIVES",
    "ANIMALS",
    "ATTRIBUTES",
    "COLOURS",
    "DAYS",
    "EVENTS",
    "FOODS",
    "FURNITURE",
    "JOBS",
    "MONTHS",
    "PLACES",
    "RELATIVES",
    "RIDES",
    "THINGS",
    "Values",
    "held_out",
]


def _words(text: str) -> list[str]:
    return text.split()


COLOURS = _words("red blue green yellow white black brown grey orange purple pink silver golden")
ADJECTIVES = [
    *COLOURS,
    *_words(
        """
    old new small big north south east west upper lower left right wooden iron narrow wide quiet cold round
    long short heavy light broken hidden front back inner outer second third last main spare stone glass
    dusty blue-green tall empty rusty fine
    """
    ),
]
PLACES = _words(
    """
    door gate cellar tower vault shed garage attic library office kitchen workshop stable chapel bridge pier
    storehouse greenhouse archive garden hall well barn mill harbour station studio laboratory locker safe
    lodge pantry house flat office car room school bank hotel shop phone laptop computer box bike cabin basement
    boat tent entrance elevator wifi printer server mailbox
    """
)
THINGS = _words(
    """
    key book lamp map box coat bag knife cup clock letter hammer rope ring camera guitar bicycle umbrella
    bottle radio blanket ladder basket mirror painting chair passport notebook flute kettle compass ticket
    scarf telescope phone laptop wallet watch pen charger hat bike car tablet suitcase jacket cable screwdriver
    toothbrush ball cake diary vase drum spoon purse headset remote
    """
)
FURNITURE = _words(
    """
    drawer cupboard chest shelf trunk suitcase basket crate bucket desk cabinet wardrobe barrel sack tin jar
    tray toolbox backpack fridge bag pocket cellar garage kitchen closet
    """
)
ANIMALS = _words(
    "cat dog horse parrot rabbit goat turtle hamster donkey goose pony fish hen cow bird mouse snake puppy kitten"
)
RELATIVES = _words(
    """
    sister brother mother father aunt uncle neighbour friend boss cousin teacher daughter son colleague wife husband
    grandmother grandfather roommate girlfriend boyfriend partner doctor mum dad baby landlord
    """
)
JOBS = _words(
    """
    baker nurse pilot teacher carpenter painter farmer doctor tailor gardener plumber lawyer singer fisher
    miller engineer librarian cook driver smith
    student writer programmer scientist dentist waiter builder actor musician
    """
)
FOODS = _words(
    """
    milk eggs bread apples pears rice salt butter cheese honey onions carrots tea coffee flour beans sugar
    plums nuts soap candles paper oats lemons garlic pepper oil fish grapes potatoes
    pizza soup pasta chocolate cake noodles pancakes bananas tomatoes ham
    """
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")

ATTRIBUTES = _words(
    """
    hobby nickname address car email password username pin size weight height title number
    serial-number shoe-size room-number favourite-film favourite-book favourite-song favourite-animal
    favourite-number favourite-town favourite-game favourite-drink lucky-number wifi-password secret-word
    last-name first-name middle-name second-name user-name bank-code locker-number seat phone-number
    licence-plate school team club street company project plan brand model version temperature
    length width depth speed price budget deadline result score goal answer capital flavour
    language instrument dream wish sign date holiday destination     """
)
ATTRIBUTES = [text.replace("-", " ") for text in ATTRIBUTES]
EVENTS = _words(
    """
    party exam concert lesson wedding holiday interview appointment flight test match race dinner lunch
    breakfast visit trip deadline birthday-party dentist-appointment piano-lesson doctor's-appointment
    """
)
EVENTS = [text.replace("-", " ") for text in EVENTS]
RIDES = _words("train bus ship ferry plane tram flight boat coach")

_FIRST = _words(
    """
    Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Mia Noah Olga Paul Rosa Simon Tina Udo
    Vera Walter Yara Zoe Alice Bob Carol Eve Frank Grace Henry Iris Jack Kate Liam Maria Nina Oscar Peter
    Ruth Sara Tom Luna Max Bella Charlie Milo Whiskers Rex Lucy Oliver Sophie Daniel Laura Martin Julia
    Lukas Ada Alan Amy Andy Bill Bruno Cara Chris Dan Diana Ella Elsa Eric Finn Fred George Hannah Helen
    Ian Ivan Jane Jim Joe John Kim Lena Lisa Mark Mary Mike Nick Nora Otto Pam Pia Rita Rob Sam Sandra Steve
    Sue Ted Ursula Victor Wendy Xavier Zack Fluffy Bello Mimi Oskar Rocky Daisy Molly Coco
    """
)
_TOWNS = _words(
    """
    Berlin Paris London Rome Madrid Oslo Vienna Prague Lisbon Dublin Hamburg Munich Cologne Boston Chicago
    Dallas Denver Seattle Toronto Sydney Tokyo Delhi Cairo Athens Geneva Zurich Milan Lyon Oxford York Bath
    Leeds Ghent Bergen Turin Naples Warsaw Riga Helsinki Stockholm
    """
)
_ONSETS = _words("b c d f g h j k l m n p r s t v w z br dr fl gr kl pr st tr sh th")
_NUCLEI = _words("a e i o u a e i o ai ea ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "nd", "rt", "x", "th"]
_TOWN_ENDS = ["", "", "ville", "burg", "ton", "field", "haven", "by"]
_SHARE = 10
"""One value in so many is held out."""


def held_out(value: str) -> bool:
    """Whether training must not see `value`."""
    return zlib.crc32(value.encode()) % _SHARE == 0


class Values:
    """Random values of every kind, all held out or all not."""

    def __init__(self, random: Random, *, unseen: bool = False) -> None:
        self.random = random
        self.unseen = unseen

    def code(self) -> str:
        """Three to six digits, most often four."""
        length = self.random.choice((3, 4, 4, 4, 4, 5, 6))
        return self._draw(lambda: "".join(self.random.choice("0123456789") for _ in range(length)))

    def name(self) -> str:
        """A name of a person or an animal: made of syllables, sometimes a common one."""
        if not self.unseen and self.random.random() < 0.25:
            return self.random.choice(_FIRST)
        return self._draw(self._name)

    def _name(self) -> str:
        random = self.random
        text = self._syllables(random.choice((1, 2, 2, 2, 3)))
        style = random.random()
        if style < 0.15:
            text = random.choice("aeiou") + text
        return text if style > 0.94 else text.capitalize()

    def town(self) -> str:
        """A name of a place."""
        if not self.unseen and self.random.random() < 0.15:
            return self.random.choice(_TOWNS)
        return self._draw(
            lambda: (self._syllables(self.random.choice((1, 2, 2))) + self.random.choice(_TOWN_ENDS)).capitalize()
        )

    def word(self) -> str:
        """A password: a made-up word, letters and digits, or two plain words."""
        style = self.random.random()
        if style < 0.5:
            return self._draw(lambda: self._syllables(self.random.choice((2, 3))))
        if style < 0.75:
            letters = "abcdefghijklmnopqrstuvwxyz0123456789"
            length = self.random.randint(4, 8)
            return self._draw(lambda: "".join(self.random.choice(letters) for _ in range(length)))
        return self._draw(lambda: f"{self.random.choice(ADJECTIVES)}-{self.random.choice(THINGS)}")

    def noun(self) -> str:
        """A short nonsense word, never held out."""
        return self._syllables(self.random.choice((1, 2, 2)))

    def clock(self) -> str:
        """A time of day."""
        minutes = self.random.randint(0, 59)
        return self._draw(lambda: f"{self.random.randint(0, 23)}:{self.random.choice((0, 15, 30, 45, minutes)):02}")

    def spot(self) -> str:
        """Where a thing can lie."""
        return self._draw(lambda: f"{self.random.choice(ADJECTIVES)} {self.random.choice(FURNITURE)}")

    def time(self) -> str:
        """A day and a time of day."""
        minutes = ("00", "10", "15", "20", "30", "45")
        random = self.random
        return self._draw(lambda: f"{random.choice(DAYS)} at {random.randint(6, 22)}:{random.choice(minutes)}")

    def date(self) -> str:
        """A day of the year."""
        return self._draw(lambda: f"{self.random.randint(1, 28)} {self.random.choice(MONTHS)}")

    def amount(self) -> str:
        """A number of two or three digits, as text."""
        return self._draw(lambda: str(self.random.randint(11, 999)))

    def phone(self) -> str:
        """A telephone number in two groups."""
        return self._draw(lambda: f"{self.random.randint(100, 999)} {self.random.randint(1000, 9999)}")

    def plain(self, words: list[str]) -> str:
        """One of a few plain words; never held out, since there is nothing to hold back."""
        return self.random.choice(words)

    def _syllables(self, count: int) -> str:
        random = self.random
        return "".join(random.choice(_ONSETS) + random.choice(_NUCLEI) + random.choice(_CODAS) for _ in range(count))

    def _draw(self, make: Callable[[], str]) -> str:
        while held_out(value := make()) is not self.unseen:
            pass
        return value
