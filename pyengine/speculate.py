"""Stage 5, speculate: guesses at the next tokens from what the text has repeated so far (prompt lookup).

Text that edits or quotes its context repeats long stretches of it. The drafter follows the place of the context that
the text seems to repeat, and offers the tokens after it; one step of the model then checks them all, because each is
compared with what the sampler gives on its row. A wrong guess costs time and never changes the text.
"""

from __future__ import annotations

MAX_DRAFT = 7  # with the token before it a step of 8, the most that the GEMV kernels take
SHORTEST, LONGEST = 2, 5  # tokens that are looked up
RESUMED, DEEPEST = 1, 8  # evidence: one token past a wrong guess, and as many right ones in a row as are told apart
STEP_COST = 0.15  # of a drafted token, in steps of one token; 0.06 to 0.3 measured, by format and ISA
RATE = 1 / 12  # of forgetting: a chance is the mean over about the last 12 guesses
FIRST_CHANCE = 0.5


class NgramDrafter:
    """Drafts the continuation of one text. Every token of it is pushed, those of the prompt first; O(1) per token.

    A guess is a place in the text: the one after the most recent earlier occurrence of the longest of the last 5 to 2
    tokens that has one. It moves on with every right token; one wrong token is skipped, as in a renamed word. Each
    pushed token says whether the guess before it was right, drafted or not. So it is known how often guesses with that
    much evidence (tokens in agreement) were right lately, and a draft is as long as that makes it pay, often 0.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, dict[int, int]] = {n: {} for n in range(SHORTEST, LONGEST + 1)}
        self.chances = [FIRST_CHANCE] * (DEEPEST + 1)  # by evidence: how often the next token was right
        self.at: int | None = None  # the guess: the next token is tokens[at]
        self.evidence = 0
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        right = False
        if self.at is not None:
            right = self.tokens[self.at] == token
            self.chances[self.evidence] += (right - self.chances[self.evidence]) * RATE
        self.tokens.append(token)
        if right:
            assert self.at is not None
            self.at, self.evidence = self.at + 1, min(self.evidence + 1, DEEPEST)
        else:
            self._look_up()
        # A hash in place of the tokens: two n-grams of one hash would only draft the wrong ones.
        for n, places in self.places.items():
            if len(self.tokens) >= n:
                places[hash(tuple(self.tokens[-n:]))] = len(self.tokens)

    def _look_up(self) -> None:
        """A place after a wrong token: the n-gram's or the one that was followed, whichever was right more often."""
        resumed = self.at + 1 if self.at is not None and self.evidence > RESUMED else None
        self.at, self.evidence = resumed, RESUMED
        for n in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            place = self.places[n].get(hash(tuple(self.tokens[-n:])))
            if place is not None:
                if resumed is None or self.chances[n] >= self.chances[RESUMED]:
                    self.at, self.evidence = place, n
                return

    def draft(self, most: int) -> list[int]:
        """The next tokens, at most `most` and MAX_DRAFT: as many as promise the most tokens for a step's time."""
        if self.at is None:
            return []
        count, best, chance, expected = 0, 1.0, 1.0, 1.0
        for k in range(1, min(most, MAX_DRAFT) + 1):
            chance *= self.chances[min(self.evidence + k - 1, DEEPEST)]
            expected += chance
            if expected > best * (1 + STEP_COST * k):
                count, best = k, expected / (1 + STEP_COST * k)
        drafted = self.tokens[self.at : self.at + count]
        while len(drafted) < count:  # the place reaches the end of the text: it goes on with its own draft
            drafted.append(drafted[len(drafted) - (len(self.tokens) - self.at)])
        return drafted
