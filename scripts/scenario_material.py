"""Hand-written material of the customer-service scenarios: problems, products, remedies' and policies' wordings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of problem. In texts ``{p}`` is the product ("kettle"), ``{days}`` a number of days.

    ``case``: how the policy names such a problem. ``topic``: words that show the agent knows what it is about.
    """

    case: tuple[str, ...]
    complaints: tuple[str, ...]
    remedies: tuple[str, ...]
    details: tuple[str, ...]
    topic: tuple[str, ...]
    groups: tuple[str, ...] = ("home", "tech", "wear", "play")


TRAIN_KINDS: dict[str, Kind] = {
    "late_parcel": Kind(
        ("late parcels", "deliveries that are late", "orders that come late"),
        (
            "My {p} should have been here {days} days ago and I am still waiting!",
            "I have been waiting {days} days too long for my {p}.",
            "Where is my {p}? It is {days} days late and nobody tells me anything.",
            "You promised my {p} within two days. It has been {days} now!",
        ),
        ("refund", "express", "voucher", "discount", "cancellation"),
        ("order_number", "order_number", "order_number", "tracking_number", "email"),
        ("late", "delay", "delayed", "waiting", "wait", "delivery"),
    ),
    "lost_parcel": Kind(
        ("lost parcels", "parcels that never arrive", "parcels that get lost"),
        (
            "The tracking says delivered, but my {p} never arrived!",
            "Your courier lost my {p}. This is unacceptable.",
            "My {p} has vanished somewhere on the way. I am furious.",
            "It says my {p} was left at my door. There is nothing here!",
        ),
        ("refund", "replacement", "voucher", "express"),
        ("order_number", "order_number", "tracking_number", "address", "postcode"),
        ("lost", "missing", "arrived", "arrive", "delivered", "courier"),
    ),
    "arrived_broken": Kind(
        ("items that arrive broken", "goods damaged on the way", "damaged items"),
        (
            "My {p} arrived broken. What a disappointment!",
            "I just opened the box and the {p} is smashed.",
            "The {p} you sent me is damaged. I am really upset.",
            "The {p} came with a huge crack in it. How can you ship that?",
        ),
        ("replacement", "refund", "discount", "repair", "free_return"),
        ("order_number", "order_number", "order_number", "photo", "email"),
        ("broken", "damaged", "damage", "smashed", "cracked", "crack", "condition"),
        ("home", "tech", "play"),
    ),
    "wrong_item": Kind(
        ("wrong items", "orders mixed up by us", "items sent by mistake"),
        (
            "I ordered a {p} and got something else entirely!",
            "You sent me the wrong {p}. Do you even check your boxes?",
            "This is not the {p} that I chose. I am so annoyed.",
            "The box should hold a {p}. It holds dog food. Seriously?",
        ),
        ("replacement", "free_return", "refund", "voucher"),
        ("order_number", "order_number", "invoice_number", "email"),
        ("wrong", "mix-up", "mistake", "mixed"),
    ),
    "wrong_size": Kind(
        ("clothes that do not fit", "wrong sizes", "things in the wrong size"),
        (
            "The {p} is far too small for me. Your size chart is a joke!",
            "My {p} does not fit at all. I needed it for today.",
            "I got the {p} in the wrong size, again!",
            "Your {p} is two sizes too big. I look ridiculous.",
        ),
        ("replacement", "free_return", "refund", "discount"),
        ("order_number", "size", "order_number", "email"),
        ("size", "fit", "small", "big"),
        ("wear",),
    ),
    "double_charge": Kind(
        ("double charges", "customers who were charged twice", "payments taken twice"),
        (
            "You charged me twice for one {p}! I want this sorted now.",
            "My bank shows two payments for the same {p}. That is theft!",
            "Why did you take the money for my {p} two times?",
            "I paid for one {p} and you billed me for two.",
        ),
        ("refund", "voucher", "discount", "cancellation"),
        ("invoice_number", "account_number", "order_number", "email"),
        ("twice", "charged", "charge", "payment", "billed", "two", "double"),
    ),
    "missing_part": Kind(
        ("missing parts", "boxes with a part missing", "sets that are not complete"),
        (
            "There is a part missing from my {p}. I cannot use it like this!",
            "I unpacked the {p} and half of the screws are not there.",
            "My {p} came without its cable. How careless is that?",
            "One piece of the {p} is missing. My whole evening is ruined.",
        ),
        ("spare_part", "replacement", "discount", "refund"),
        ("order_number", "order_number", "serial_number", "address", "photo"),
        ("missing", "part", "parts", "piece", "incomplete"),
        ("home", "tech", "play"),
    ),
    "stopped_working": Kind(
        ("devices that fail under warranty", "warranty cases", "products that stop working"),
        (
            "My {p} stopped working after {days} days!",
            "The {p} is dead. It does not even turn on any more.",
            "After only {days} days my {p} gave up. Such poor quality!",
            "My {p} broke down and it is still under warranty.",
        ),
        ("repair", "replacement", "technician", "warranty", "voucher"),
        ("serial_number", "purchase_date", "order_number", "serial_number"),
        ("working", "stopped", "dead", "broke", "warranty", "work", "failed"),
        ("tech",),
    ),
    "price_drop": Kind(
        ("price drops after a purchase", "items that get cheaper in the same week", "price complaints"),
        (
            "I paid full price for the {p} and today it is half off!",
            "One day after I bought the {p} you cut the price. Unfair!",
            "Your {p} is now 40 dollars cheaper than last week. I feel cheated.",
            "Why is the {p} suddenly so cheap? I paid much more on Monday.",
        ),
        ("voucher", "refund", "discount", "free_return"),
        ("invoice_number", "purchase_date", "order_number", "email"),
        ("price", "cheaper", "paid", "cost"),
    ),
    "return_ignored": Kind(
        ("returns that were not handled", "returns left unanswered", "delayed returns"),
        (
            "I sent the {p} back {days} days ago and heard nothing since!",
            "My return of the {p} is being ignored. I am losing patience.",
            "You got my {p} back, and still no answer after {days} days.",
            "Nobody replies about the {p} that I returned. This is awful service.",
        ),
        ("refund", "voucher", "replacement", "discount"),
        ("tracking_number", "account_number", "order_number", "phone"),
        ("return", "returned", "back", "answer", "reply", "response"),
    ),
    "poor_quality": Kind(
        ("quality complaints", "products of poor quality", "faded or torn goods"),
        (
            "The colour of my {p} faded after one wash!",
            "A seam of the {p} came apart on the first day.",
            "Your {p} looks nothing like the picture. It is so cheap!",
            "The {p} fell to pieces within {days} days. What rubbish.",
        ),
        ("replacement", "discount", "refund", "voucher", "free_return"),
        ("photo", "order_number", "purchase_date", "email"),
        ("quality", "faded", "torn", "apart", "pieces", "seam"),
        ("wear",),
    ),
    "setup_trouble": Kind(
        ("setup problems", "customers who cannot set up a product", "installation trouble"),
        (
            "I tried for three hours to set up the {p}. It is hopeless!",
            "The manual of the {p} is useless and nothing connects.",
            "I cannot get the {p} to run at all. I am so frustrated.",
            "Installing your {p} is a nightmare. Help me!",
        ),
        ("technician", "free_return", "replacement", "discount"),
        ("phone", "serial_number", "address", "postcode"),
        ("setup", "set", "install", "installing", "installation", "connect", "manual"),
        ("tech",),
    ),
    "missed_appointment": Kind(
        ("missed delivery appointments", "drivers who do not show up", "missed delivery slots"),
        (
            "I stayed home all day for the {p} and your driver never came!",
            "Your driver missed the appointment for my {p} again.",
            "I took a day off for the {p}. Nobody showed up!",
            "Third time that nobody comes with my {p}. I have had enough.",
        ),
        ("express", "voucher", "discount", "cancellation"),
        ("phone", "address", "order_number", "postcode"),
        ("appointment", "driver", "missed", "delivery", "came", "showed"),
    ),
}

UNSEEN_KINDS: dict[str, Kind] = {
    "used_item": Kind(
        ("items that turn out to be used", "used goods sold as new", "opened boxes"),
        (
            "The {p} was clearly used before. There are stains on it!",
            "You sold me a second-hand {p} as new. Shame on you!",
            "Someone had opened the box of my {p} already. Disgusting.",
        ),
        ("replacement", "refund", "discount", "free_return"),
        ("photo", "order_number", "invoice_number"),
        ("used", "new", "opened", "second-hand", "stains"),
    ),
    "cancelled_but_sent": Kind(
        ("orders sent although called off", "parcels that were called off", "orders called off too late"),
        (
            "I called off the {p} last week and you shipped it anyway!",
            "Why do I get a {p} that I said no to?",
            "You ignored my message and sent the {p} all the same.",
        ),
        ("free_return", "refund", "voucher"),
        ("order_number", "email", "account_number"),
        ("shipped", "sent", "order", "anyway"),
    ),
    "code_rejected": Kind(
        ("promo codes that fail", "rejected promo codes", "code problems at checkout"),
        (
            "Your checkout refused my promo code for the {p}!",
            "The code from your newsletter does nothing for the {p}. Is it a scam?",
            "I paid more for the {p} because my code was rejected.",
        ),
        ("discount", "voucher", "refund"),
        ("email", "account_number", "order_number"),
        ("code", "promo", "checkout", "rejected"),
    ),
    "hidden_fee": Kind(
        ("hidden fees", "unexpected fees", "fees that were not shown"),
        (
            "There is a fee of 15 dollars on my {p} that nobody mentioned!",
            "You added a strange fee to the bill for my {p}.",
            "What is this handling fee for the {p}? I never agreed to that.",
        ),
        ("refund", "voucher", "discount", "cancellation"),
        ("invoice_number", "order_number", "account_number"),
        ("fee", "fees", "bill", "cost"),
    ),
    "noisy_device": Kind(
        ("noisy devices", "devices with a strange noise", "noise complaints"),
        (
            "My {p} makes a horrible noise all night long!",
            "The {p} rattles so loudly that I cannot think.",
            "There is a constant buzz from the {p}. It drives me mad.",
        ),
        ("repair", "technician", "replacement", "warranty"),
        ("serial_number", "purchase_date", "phone"),
        ("noise", "noisy", "loud", "buzz", "rattles", "sound"),
        ("tech",),
    ),
    "left_in_rain": Kind(
        ("parcels left in the rain", "parcels spoiled by the weather", "wet parcels"),
        (
            "Your driver left the {p} in the rain and it is soaked!",
            "The box with my {p} stood in a puddle all day.",
            "My {p} is wet through because of your courier.",
        ),
        ("replacement", "refund", "express", "voucher"),
        ("photo", "tracking_number", "order_number", "postcode"),
        ("rain", "wet", "soaked", "puddle", "water"),
    ),
    "bad_smell": Kind(
        ("goods with a bad smell", "products that smell", "smell complaints"),
        (
            "The {p} stinks of chemicals. I had to leave the room!",
            "There is an awful smell from my new {p}.",
            "I aired the {p} for {days} days and it still smells terrible.",
        ),
        ("free_return", "refund", "replacement", "discount"),
        ("order_number", "purchase_date", "email"),
        ("smell", "smells", "stinks", "chemicals"),
        ("wear", "home"),
    ),
}

PRODUCTS: dict[str, tuple[str, ...]] = {
    "home": (
        "kettle", "desk lamp", "bookshelf", "coffee table", "frying pan", "teapot", "garden chair", "mirror",
        "mattress", "picture frame", "wine rack", "knife set", "rug", "office chair",
    ),
    "tech": (
        "blender", "keyboard", "printer", "headset", "tablet", "toaster", "vacuum cleaner", "camera", "monitor",
        "washing machine", "speaker", "router", "coffee machine", "electric shaver", "dishwasher",
    ),
    "wear": (
        "jacket", "dress", "raincoat", "sweater", "backpack", "suit", "swimsuit", "handbag", "belt", "wool scarf",
        "winter coat", "T-shirt",
    ),
    "play": (
        "board game", "guitar", "tent", "bicycle", "telescope", "puzzle", "skateboard", "dollhouse", "tennis racket",
        "paint set", "fishing rod", "train set",
    ),
}  # fmt: skip
# Named in held-out scenarios only.
UNSEEN_PRODUCTS: dict[str, tuple[str, ...]] = {
    "home": ("armchair", "clock", "bread bin"),
    "tech": ("hair dryer", "microwave", "projector"),
    "wear": ("blazer", "cardigan"),
    "play": ("violin", "sled", "kayak"),
}

SHOPS = (
    "Northwind", "Maple & Co", "Bluebird", "Harbour Goods", "Lindenhof", "Cedar Lane", "Pinecrest", "Old Mill Store",
    "Sunny Side", "Fernbrook", "Kite & Key", "Marlow's", "Redwood Market", "Tall Ships", "Willow House", "Quayside",
)  # fmt: skip

# What follows the complaint; {detail} as the shop's own form calls it.
ENDINGS = (
    "Which details do you need?",
    "Do you need my {detail}?",
    "I am upset. Which details do you need?",
    "What information do you need?",
    "This is a disgrace. Just ask me for my {detail}.",
    "What details can I provide?",
    "Help me! Do you want my {detail}?",
    "I am fed up. What details do you want?",
    "Which information can I provide?",
    "Please ask me for my {detail}.",
    "I am really angry.",
    "Never again!",
)

# {shop} {case} {remedy} {detail}; every wording names the one remedy that is allowed and the detail needed before it.
POLICIES = (
    "You are a customer service agent of {shop}. For {case} we can offer {remedy}. First ask for the {detail}.",
    "You are a customer service agent. Please ask for the {detail}. Then say: we can offer {remedy} for {case}.",
    "You help the customers of {shop}. Please ask for their {detail} first. Then offer {remedy}, as for all {case}.",
    "You are a support agent of {shop}. You need the customer's {detail}. Then we can offer {remedy} for {case}.",
    "You answer complaints for {shop}. Apologise and ask for the {detail}. For {case} we can offer {remedy}.",
    "You work in customer service at {shop}. Ask the customer for the {detail}. For {case} you can offer {remedy}.",
    "You are a friendly agent of {shop}. We can offer {remedy} for {case}. Ask for the {detail} before you do.",
    "You are an agent of {shop}. Ask the customer to provide the {detail}. Then we can offer {remedy} for {case}.",
)
STYLES = (
    "Ask if the offer is okay. Reply in one or two short sentences.",
    "Make sure the customer agrees. Reply in one or two short sentences.",
    "Get the customer's okay. Write one or two short sentences.",
    "Say sorry and ask if they agree. Use one or two short sentences.",
)

# What a colleague said before a handover.
APOLOGIES = (
    "I am sorry about your {p}.",
    "I am sorry to hear that.",
    "I am sorry for the trouble with the {p}.",
    "We apologise for the inconvenience.",
    "I am so sorry about this.",
)
REQUESTS = (
    "Can you please give me your {detail}?",
    "What is your {detail}?",
    "Please tell me your {detail}.",
    "May I have your {detail}?",
    "I need your {detail}, please.",
)

STREETS = ("Mill Road", "Park Lane", "Station Street", "Oak Avenue", "Church Hill", "Bridge Street", "Rose Court")
FIRST_NAMES = (
    "anna", "ben", "carla", "david", "ella", "farid", "grace", "hugo", "ines", "jonas", "kim", "lena", "marco", "nora",
    "omar", "paula", "rosa", "sam", "tara", "viktor", "wendy", "yusuf", "zoe", "mila",
)  # fmt: skip
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "November")
SIZES = ("size 38", "size 40", "size 42", "size 44", "a medium", "a large", "a small", "an extra large")
