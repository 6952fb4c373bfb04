"""What customer-service talk looks like: the remedies and details there are, and the phrasings that carry them.

Data only. A remedy's ``strong`` forms name it and no other; its ``weak`` forms are read as that remedy only where it
is the right one ("we'll send a new one" may mean a replacement or a second parcel): a vague word alone accuses nobody.
Two things offered side by side are two offers, however vague.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """``names`` are how policies and customers call it ("a full refund")."""

    names: tuple[str, ...]
    strong: re.Pattern[str]
    weak: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Detail:
    """A fact the agent needs. ``names`` follow "the" or "your"; ``forms`` are ways to speak of it."""

    names: tuple[str, ...]
    forms: re.Pattern[str]


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(rf"(?:{alternative})" for alternative in alternatives))


_REFUND = _any(
    r"\b(?:refund(?!able)\w*|reimburs\w+)\b",
    r"\bmoney back\b",
    r"\b(?:return|give|send|pay) (?:you )?(?:back )?(?:all |all of )?your money\b",
    r"\bpay (?:you|it) back\b",
)
REMEDIES: dict[str, Remedy] = {
    "refund": Remedy(("a full refund", "a refund", "your money back", "a complete refund"), _REFUND),
    "replacement": Remedy(
        ("a replacement", "a free replacement", "a new one", "an exchange"),
        _any(r"\breplac(?:e|es|ed|ing|ement|ements)\b", r"\bexchang(?:e|ed|ing)\b", r"\bswap(?:ped|ping)?\b"),
        _any(
            r"\b(?:brand[- ])?new (?:one|item|product|unit|copy|pair|set|parcel|package)\b",
            r"\banother (?:one|unit|parcel)\b",
            r"\b(?:send|ship) (?:you )?(?:a|another|the) (?:new|right|correct)\b",
            r"\b(?:re-?send|re-?ship)\w*\b",
        ),
    ),
    "repair": Remedy(
        ("a free repair", "a repair", "a repair at no cost", "a repair in our workshop"),
        _any(r"\brepair(?!er)\w*\b", r"\bmend(?:ed|ing)?\b"),
        _any(r"\b(?:fix(?:ed|ing)?) (?:it|your|the|them)\b(?! (?:problem|issue|mistake|error|situation))"),
    ),
    "voucher": Remedy(
        ("a voucher", "a gift voucher", "store credit", "a gift card"),
        _any(r"\bvouchers?\b", r"\bgift (?:card|certificate)s?\b", r"\b(?:store|shop) credits?\b"),
        _any(r"\bcoupons?\b", r"\bcredit (?:to|on|in|for) your (?:account|next)\b"),
    ),
    "discount": Remedy(
        ("a discount", "a price discount", "a 20% discount", "money off the price"),
        _any(r"\bdiscount(?!inu)\w*\b", r"\b(?:\d+ ?%|percent|money) off\b", r"\bprice reduction\b"),
        _any(r"\b(?:reduce|lower|cut) (?:the|your) price\b", r"\breduced price\b", r"\blower price\b"),
    ),
    "express": Remedy(
        ("express delivery", "free express delivery", "express shipping", "priority shipping"),
        _any(
            r"\b(?:express|priority|overnight|expedited)(?: \w+)? (?:deliver\w*|ship\w*|post|mail|courier|service)\b",
            r"\b(?:by|via|with|through) (?:express|priority|overnight)\b",
            r"\bexpedite\b",
        ),
        _any(r"\b(?:next|same)[- ]day\b", r"\bexpress\b"),
    ),
    "free_return": Remedy(
        ("a free return label", "a free return", "a prepaid return label", "a free pickup"),
        _any(
            r"\breturn labels?\b",
            r"\b(?:free|prepaid|paid) (?:return|pick-?up|collection|shipping label|label)s?\b",
            r"\bpick (?:it|them|the \w+|your \w+) up\b",
        ),
        _any(r"\bpick-?up\b", r"\breturn (?:it|them) (?:for free|free of charge|at no cost)\b", r"\bcollect(?:ion)?\b"),
    ),
    "technician": Remedy(
        ("a visit from a technician", "a technician visit", "a home visit by a technician", "an engineer visit"),
        _any(r"\btechnicians?\b", r"\bengineers?\b", r"\bhome visits?\b"),
        _any(r"\bvisit\b", r"\bexpert to your\b"),
    ),
    "spare_part": Remedy(
        ("the missing part by post", "a free spare part", "the spare part", "the missing part for free"),
        _any(
            r"\bspare (?:part|piece)s?\b",
            r"\bmissing (?:part|piece)s? (?:by|for free|free|right away|today|now|to you)\b",
        ),
        _any(r"\bmissing (?:part|piece)s?\b", r"\bnew (?:part|piece)s?\b", r"\bthe parts?\b"),
    ),
    "cancellation": Remedy(
        ("a free cancellation", "cancellation without a fee", "a cancellation at no cost"),
        _any(r"\bcancel(?:l?ing|l?ed|lation|lations)?\b"),
    ),
    "warranty": Remedy(
        ("a longer warranty", "an extended warranty", "one more year of warranty"),
        _any(
            r"\b(?:extend|extending|lengthen|prolong)(?:ed)? (?:\w+ )?(?:warranty|guarantee)\b",
            r"\bwarranty extension\b",
            r"\b(?:longer|additional|extra|another)(?: \w+){0,2} (?:warranty|guarantee)\b",
            r"\b(?:extra|more|another|additional|one) (?:more )?year\b",
        ),
        _any(r"\bwarranty\b"),
    ),
}

# What comes with a remedy rather than beside it: a technician fixes things, goods are collected to be exchanged.
ACCOMPANIES: dict[str, frozenset[str]] = {
    "technician": frozenset({"repair"}),
    "repair": frozenset({"technician", "free_return"}),
    "refund": frozenset({"free_return"}),
    "replacement": frozenset({"free_return"}),
    "cancellation": frozenset({"free_return"}),
}
# A vague word that says what the case is about: "for the missing part", "under warranty", "the warranty covers it".
ASIDE_BEFORE = re.compile(
    r"\b(?:for|(?<!how )(?<!what )about|under|of|regarding) (?:(?:the|your|our|a|this|its|next) )*$"
)
ASIDE_AFTER = re.compile(r" (?:covers?|applies|includes|our|us|(?:is|was) (?:missing|still valid))\b")
BESIDE = re.compile(r"[,;:/&+]|\b(?:or|and|plus|then|alternatively|else)\b")

_NUMBER = r"(?:numbers?|no\.?|nr|id|ids|code|reference|ref|#)"
DETAILS: dict[str, Detail] = {
    "order_number": Detail(
        ("order number", "order number", "order ID"),
        _any(rf"\border(?:'s)? {_NUMBER}", r"\border reference\b", r"\bnumber of (?:your|the) order\b"),
    ),
    "serial_number": Detail(("serial number", "serial number of the device"), _any(rf"\bserial {_NUMBER}")),
    "tracking_number": Detail(
        ("tracking number", "tracking code"),
        _any(rf"\b(?:tracking|parcel|shipment|package) {_NUMBER}", r"\btracking (?:info|information|details)\b"),
    ),
    "invoice_number": Detail(
        ("invoice number", "receipt number"), _any(rf"\b(?:invoice|receipt|bill) {_NUMBER}", r"\byour receipt\b")
    ),
    "account_number": Detail(
        ("account number", "customer number"), _any(rf"\b(?:account|customer|member|membership|client) {_NUMBER}")
    ),
    "email": Detail(
        ("email address", "email"),
        _any(r"\be-?mail address\b", r"\b(?:your|their|customer's|the|an|which|what) e-?mail\b"),
    ),
    "phone": Detail(
        ("phone number", "telephone number"),
        _any(
            r"\b(?:tele)?phone number\b",
            r"\b(?:mobile|contact|cell|cellphone) number\b",
            r"\bnumber to (?:call|reach)\b",
        ),
    ),
    "address": Detail(
        ("delivery address", "home address", "shipping address"),
        _any(
            r"(?<!mail )(?<!-mail )\baddress\b(?! (?:your|the|this|that|any|it|these|all)\b)",
            r"\bwhere (?:do|did|should|can|are|is) (?:you|we|i|it) (?:live|living|ship|send|deliver)",
        ),
    ),
    "postcode": Detail(
        ("postcode", "postal code", "ZIP code"), _any(r"\bpost ?code\b", r"\bzip\b", r"\bpostal code\b")
    ),
    "purchase_date": Detail(
        ("date of purchase", "purchase date"),
        _any(
            r"\bdate of (?:the |your )?(?:purchase|order)\b",
            r"\b(?:purchase|order) date\b",
            r"\bdate (?:when |that |on which )?you (?:bought|purchased|ordered)\b",
            r"\b(?:when|what (?:day|date)|which (?:day|date)) (?:did )?you (?:buy|bought|purchase|order)\w*\b",
            r"\bday (?:when |that )?you (?:bought|purchased|ordered)\b",
        ),
    ),
    "photo": Detail(
        ("photo of the damage", "photo", "picture"), _any(r"\bphoto\w*\b", r"\bpictures?\b", r"\bimages?\b")
    ),
    "size": Detail(
        ("size", "clothing size"),
        _any(
            r"\b(?:which|what|right|correct|preferred|exact|your|their|customer's|the|clothing) sizes?\b",
            r"\bsize (?:do )?you (?:need|want|wear|order|would)\w*\b",
        ),
    ),
}

APOLOGY = _any(
    r"\b(?:i|we)(?:'m| am|'re| are)? (?:\w+ ){0,2}sorry\b",
    r"^(?:oh,? |oh no,? )?(?:so |very |really )?sorry (?:about|for|to|that|you|your|the|this)\b",
    r"\b(?:i|we) (?:\w+ ){0,3}apologi[sz]e\b",
    r"\b(?:my|our) (?:\w+ ){0,2}apolog(?:y|ies)\b",
    r"\bapologies (?:for|about|that)\b",
    r"\b(?:accept|offer|extend) (?:you )?(?:my|our) (?:\w+ ){0,2}apolog(?:y|ies)\b",
    r"\bplease forgive (?:me|us)\b",
    r"\b(?:i|we) (?:\w+ )?regret (?:that|the|this|to hear|your|what|how)\b",
)
# "I'm sorry, but I'm unable to assist" refuses; it does not apologise.
NO_APOLOGY = _any(
    r"\b(?:not|never|hardly|barely|scarcely|rarely|seldom|far from|no longer) (?:\w+ )?"
    r"(?:sorry|apologi[sz]\w+|regret)\b",
    r"\b(?:would|'d|might|could|should|will)(?: have)? (?:be|been|feel) (?:\w+ )?sorry\b",
    r"\b(?:would|'d|might|could) (?:apologi[sz]e|regret)\b|\b(?:refuse|decline) to apologi[sz]e\b",
    r"\bsorry for (?:myself|ourselves)\b",
    r"\b(?:sorry|apologi[sz]e|apologies),? (?:but|however) .*(?:\bunable\b|n't\b|\bnot\b|\bcannot\b|\bno\b)",
    r"\b(?:sorry|apologi[sz]e),? (?:to say )?(?:that )?(?:i|we)(?: am| are|'m|'re)? (?:unable|cannot|not)\b",
    r"\b(?:sorry|apologi[sz]e),? (?:to say )?(?:that )?(?:i|we) (?:can't|don't|won't)\b",
)
# What the apology is for, when it names neither the product nor the problem.
ACKNOWLEDGED = _any(
    r"\b(?:hear|read|learn|know|see) (?:that|about|of|this|your|you)\b",
    r"\b(?:about|for|with) (?:that|this|the|your|our|any|all|what|such)\b",
    r"\b(?:sorry|apologi[sz]e) (?:that|you|your|the|this|it|to|we|i)\b",
    r"\b(?:inconvenience|trouble|frustrat\w+|problem|issue|mistake|error|delay|experience|mix-?up|upset|disappoint\w+)\b",
)

# Words that may stand between a request and what is requested ("give me the full order number of your ...").
_BETWEEN = (
    r"(?:(?:,|me|us|with|the|that(?! the| your)|your|a|an|please|correct|full|original|exact|valid|of|for|own|name|"
    r"email|phone|and|or|to|know|what|is|here|also|about|(?:your|the) [\w'-]+|back|over|along|by|through|both|first|"
    r"clear|quick|kindly|now)[ ,]*){0,7}$"
)
_HAND_OVER = (
    r"(?:provide|share|send|give|tell|show|enter|state|supply|submit|confirm|include|email|message|pass|hand|"
    r"reply with|respond with|let (?:me|us) (?:know|have)|attach|upload|specify|write)"
)
# What comes before the detail when it is asked for; each ends where the detail begins.
REQUEST = _any(
    rf"\b(?:please|can you|could you|would you|will you|just|kindly|need you to) (?:\w+ )?{_HAND_OVER} {_BETWEEN}",
    rf"(?:^|[,;:] ?|\b(?:so|and|now|then|first) )(?:just |please |kindly )?{_HAND_OVER} {_BETWEEN}",
    rf"\b(?:may|can|could|might) (?:i|we) (?:\w+ )?(?:have|get|know|ask(?: you)? for|take|see|request) {_BETWEEN}",
    rf"\b(?:i|we)(?:'ll| will| would|'d| do| just| only| first| also| still| must| have)* "
    rf"(?:need|require|like|want|(?:to )?ask)(?: you)?(?: for)?(?: to)?"
    rf"(?: (?:know|have|get|see|take|{_HAND_OVER}))? {_BETWEEN}",
    rf"\b(?:whats|what|which)(?:'s| is| was| are| would be| might be)? {_BETWEEN}",
    rf"\bdo you (?:\w+ ){{0,2}}(?:have|know|remember) {_BETWEEN}",
    rf"\bwould you mind (?:telling|giving|sending|sharing|providing) {_BETWEEN}",
    rf"\b(?:can|could) you (?:\w+ )?(?:find|look up|look for|look out|check) {_BETWEEN}",
    rf"\bhave you got {_BETWEEN}",
)
# "Your order number, please?", "Order number?"
BARE_REQUEST = re.compile(r"^(?:and |so |thank you, |thanks, |please, )?(?:(?:your|the) (?:\w+ )?)?$")

# Asks the customer for information of some kind.
INQUIRY = _any(
    r"\b(?:can|could|would|will) you (?:\w+ )?(?:provide|specify|tell|give|share|send|explain|describe)\b",
    r"\b(?:can|could|would|will) you (?:please )?let (?:me|us) know\b",
    r"\bplease (?:\w+ )?(?:provide|specify|tell|give|share|send|describe)\b",
    r"\b(?:what|which) (?:is|was|are) (?:your|the)\b.*\?",
    r"\b(?:can|may|could) (?:i|we) (?:please )?(?:have|ask|get|know)\b",
)

# A sentence that names a remedy offers it when one of these carries it.
OFFER = _any(
    r"\b(?:i|we|they|our \w+|the team)(?:'ll| will| can| could| would|'d| shall| may| am| are|'m|'re| have|'ve)\b",
    r"\b(?:i|we) (?:\w+ )?(?:offer|give|send|provide|arrange|issue|process|suggest|propose)\b",
    r"\b(?:i|we) (?:\w+ )?(?:replace|refund|repair|cancel|exchange)\b",
    r"\byou(?:'ll| will| can| may| could| are| qualify|'re| get| receive)\b",
    r"\bwould you (?:\w+ )?(?:like|prefer|want|accept|be)\b",
    r"\b(?:do|did) you (?:want|accept|prefer|agree)\b",
    r"\bif you(?:'d| would) like\b",
    r"\b(?:how|what) about\b",
    r"\b(?:shall|can|may|could|should) (?:i|we)\b",
    r"\blet (?:me|us) (?!know)\w+\b",
    r"\b(?:happy|glad|pleased|going|able) to\b",
    r"\b(?:allows?|permits?|lets|enables?) (?:me|us)(?: to)? (?:offer|give|send|arrange|provide|issue)\b",
    r"\bhere(?:'s| is)\b",
    r"\b(?:will be|is being|has been|can be|are being|is on|is now|is ready|was) ?(?:\w+)?\b",
    r"\bis (?:a|the|your|an|yours|available|possible)\b.*\b(?:ok|okay|alright|fine|good)\b",
)
# Offers something, whatever it is.
PROPOSAL = _any(
    r"\b(?:i|we)(?:'ll|'d)? (?:\w+ ){0,4}(?:offer|arrange|refund|replace|repair|compensate)\b",
    r"\b(?:i|we)(?:'ll|'d)? (?:\w+ ){0,4}(?:give|send|get) you\b",
)
# Said of what the customer wants or what policies say in general: naming a remedy so is not offering it.
REPORTED = _any(
    r"\byou (?:want|wanted|asked|requested|are asking|were hoping|hoped|are looking|are waiting|said|mentioned)\b",
    # "Our policy allows a refund" reports; "under our policy you get", "it allows me to offer you" offer.
    r"\b(?:our|the|store|shop|company) (?:\w+ )?polic(?:y|ies)\b"
    r"(?!.*\b(?:(?:me|us) to (?:offer|give|send|arrange|provide|issue)"
    r"|(?:i|we|you)(?:'ll| can| will| get| receive|'re| are))\b)",
    r"\b(?:what|which) (?:type|kind|sort|form)s? of\b",
    r"\b(?:i|we)(?:'d| would)? (?:really )?(?:like|need|want|expect|demand) (?:a|an|the|my)\b",
    r"\b(?:i|we)(?:'d| would)? (?:really )?(?:like|need|want|expect) to (?:have|get|request|receive)\b",
    r"\b(?:ask|asking|contact \w+|wait) (?:us |me |them )?for\b",
    r"\byou(?:'ll| will| can| are|'re)? (?:be |now )?(?:offering|providing|giving|sending|replacing|refunding)\b",
    r"\bplease (?:\w+ )?(?:confirm that|accept that|provide|offer|present|submit|proceed|ensure|send|give)\b[^,;]*$",
    r"\b(?:check|see|find out|look into|ask|know|decide|determine|wonder|sure|verify) (?:if|whether|about)\b",
    r"\bif you (?:want|need|would like|'d like) to (?:know|ask)\b",
)
# After a comma the agent speaks for itself again: "as you are waiting for it, I will give you".
OWN_WORDS = re.compile(
    r"[,;:] (?:so |then |and |but )?(?:i|we|you)"
    r"(?:'ll|'d| will| can| could| would| am| are|'m|'re| have|'ve| get| offer)\b"
)
# Words before a remedy, in its clause, that make it none: hedged, past, another's, sold, taken away.
_OTHERS = (
    r"(?:(?:my|our|his|her|their|the|some|any|a|an|all|other|another|every) )*(?:someone|somebody|others|nobody|myself|"
    r"us|ourselves|colleagues?|friends?|boss|managers?|neighbou?rs?|staff|famil(?:y|ies)|wife|husband|brother|sister|mother|"
    r"father|(?:(?<=other )|(?<=another ))(?:customers?|clients?|people|persons?))"
)
_STOPPED = (
    r"(?:stop(?:ped)?|end(?:ed)?|withdr[ae]wn?|revoked?|removed?|abolish(?:ed)?|discontinued?|void(?:ed)?|deleted?)"
)
NO_OFFER_BEFORE = _any(
    r"\b(?:hardly|barely|scarcely|rarely|seldom|doubt\w*|unlikely|nobody|no one|nothing|too late for|used to)\b",
    r"\b(?:could|would|might|should)(?: have|'ve) (?:\w+ed|given|sent|been|made|paid|bought|got|had)\b",
    r"\blast (?:year|month|week|time|summer|winter)\b",
    rf"\b(?:give|send|offer|grant|pay|show|promise) {_OTHERS} ",
    r"\byou (?:\w+ )?(?:buy|purchase|pay for)\b",
    r"\b(?:expired|invalid|fake|worthless|useless|zero|0 ?%) (?:\w+ )?$",
    rf"\b(?:{_STOPPED}|den(?:y|ied)|declined?|rejected?|refused?|cancel(?:led)?|out of|charge you for)"
    r" (?:(?:your|the|that|this|any|our|all|a|an) )*(?:\w+ )?$",
)
# Words after it, in the same sentence, that do so.
NO_OFFER_AFTER = _any(
    rf"^[^,;]{{0,30}}\b(?:to|for) {_OTHERS}\b",
    r"\bnot (?:to|for|with) you\b",
    r"^ (?:\w+ )?(?:away|expired|ended|ran out)\b",
    rf"^ (?:is|are|has|have|was|were)(?: \w+){{0,2}} (?:expired|over|gone|invalid|unavailable|worthless|{_STOPPED})\b",
    r"\b(?:if|once|when|after) you (?:first )?(?:pay|buy|purchase)\b",
    r"\b(?:for|at) (?:its|the|your own) (?:full )?(?:price|cost|expense)[.?!]*$",
    r"\bworth (?:nothing|zero)\b|\bof no (?:value|worth|use)\b|\bworthless\b",
    r"^ you nothing\b|\b(?:is|of|for) (?:zero|nothing|0 ?%)(?! cost)|\bmaybe never\b",
)
# Anywhere in a turn: takes back what it offered.
RETRACTION = _any(
    r"\b(?:i|we) (?:must |have to |will )?(?:take (?:that|it|this) back|changed (?:my|our) minds?)\b",
    r"\b(?:just|only) (?:kidding|joking|a joke)\b|\b(?:i|we) (?:was|were|am|'m|are) (?:kidding|joking|lying)\b",
    r"\byou(?:'ll| will| shall| just| only)* (?:get|receive|have) nothing\b|\bnothing for you\b",
    r"\b(?:did not|didn't|do not|don't) mean (?:it|that)\b|\bforget what (?:i|we) said\b|\bon second thoughts?\b",
)
NEGATION = _any(
    r"\b(?:not|never|no|cannot|unable|neither|nor|without|impossible|instead of|rather than|except|refuse)\b",
    r"n't\b",
)

_GOOD = r"(?:ok|okay|alright|all right|fine|good|acceptable|suit\w*|work\w*|help\w*|agreeable|happy|satisf\w+)"
_DO_IT = (
    r"(?:go ahead|proceed|arrange|send|do|process|start|issue|offer|replace|refund|repair|give|book|cancel|provide|get|"
    r"set)"
)
INVITATION = _any(
    rf"\b(?:is|would|will|was|are) (?:that|this|it|you)(?: be)? (?:\w+ )?{_GOOD}\b",
    r"\b(?:does|do|would|will|might|could) (?:that|this|it|these)(?: \w+)? (?:work|sound|suit|help|seem|solve|be)\b",
    r"\bhow (?:does|would|is) (?:that|this|it)\b",
    r"\bis (?:that|this|it) what you(?:'d| would)? (?:like|want|prefer|need)\b",
    r"\bwh(?:en|at (?:time|day)) (?:would|will|does|could) (?:\w+ )?(?:suit|work for|be good for) you\b",
    r"\bwhat (?:do|would) you (?:think|say)(?: (?:about|of|to) (?:it|that|this))?\W*$",
    r"\b(?:sounds?|works?|okay|ok|alright|fine|good) (?:good |ok |okay )?(?:to|for|with|by) you\b",
    r"\bwould you (?:\w+ )?(?:like|prefer|accept|want)\b",
    r"\bwould you (?:\w+ )?be (?:happy|ok|okay|willing|interested|satisfied|fine)\b",
    r"\bdo you (?:want|accept|agree|prefer|approve)\b",
    rf"\b(?:shall|should|may|can|could) (?:i|we) (?:\w+ )?{_DO_IT}\b",
    r"\bplease (?:\w+ )?(?:accept|agree|approve)\b(?! that\b)",
    r"\b(?:could|can|would|will) you (?:\w+ )?(?:accept|agree|approve)\b",
    r"\b(?:please|(?:could|can|would|will) you) (?:\w+ )?confirm(?:$|[.!?,]| (?:this|it|if|whether|your agreement)\b)",
    r"\bconfirm that (?:you (?:agree|accept|are (?:happy|ok|okay|fine)|would like|want)|(?:this|that|it) is)\b",
    r"\blet (?:me|us) know (?:if|whether|that) (?:that|this|it)\b",
    r"\blet (?:me|us) know (?:if|whether|that) you(?:'d| would|'re| are)? (?:like|agree|accept|happy|ok|okay|fine)\b",
    r"\bif (?:that|this|it)(?:'s| is| works| suits| sounds)\b",
    r"\bif you (?:agree|accept|like|are happy|are ok|are okay)\b",
    r"\b(?:ok|okay|alright|all right|agreed|deal|right) ?\?",
    r"\b(?:await|wait for|need|like to have) your (?:confirmation|agreement|approval|okay|consent|yes)\b",
)

# The simulated customer says one of these to accept; the grader knows a confirmation by them.
ACCEPTANCES: tuple[str, ...] = (
    "Yes, that works for me. Thank you.",
    "Yes, please do that. Thanks.",
    "Okay, I accept that. Thank you.",
    "That sounds fair. Yes, go ahead.",
    "Fine, I agree. Thanks for sorting it out.",
    "Yes, that is what I wanted. Thank you.",
    "All right, yes. That settles it.",
)

# Words that hold sentences together; text without them is a list of keywords.
FUNCTION_WORDS: frozenset[str] = frozenset(
    """
    a an the this that these those my your our his her its their i you we he she it they me us him them who what
    which when where how why and or but so if as than then because while for from to of in on at by with about into over
    after before is am are was were be been being do does did have has had will would can could may might shall should
    must not no yes please there here all any some more just also very really i'm i'll i've i'd we'll we're we've we'd
    you'll you're you've you'd it's that's don't can't let
    """.split()  # noqa: SIM905
)
