# ruff: noqa: E501 (conversations keep their lines)
"""Hand-written conversations for the grader. ``A:`` agent, ``C:`` customer; the opening comes from the scenario."""

from __future__ import annotations

from dataclasses import dataclass

from mdapo.types import Message, Prompt


def scenario(*, detail: str, value: str, remedy: str, topic: list[str], system: str, complaint: str) -> Prompt:
    return Prompt(
        uid="t",
        row=0,
        messages=(Message("system", system), Message("user", complaint)),
        data_source="customer_service",
        ground_truth={"detail": detail, "value": value, "remedy": remedy, "topic": topic},
    )


KETTLE = scenario(
    detail="order_number",
    value="KX-48213",
    remedy="replacement",
    topic=["kettle", "broken", "damaged"],
    system="You are a customer service agent of Northwind. For items that arrive broken we offer a free replacement. "
    "First ask for the order number. Reply in one or two short sentences.",
    complaint="My kettle arrived broken. I am really upset.",
)
PARCEL = scenario(
    detail="email",
    value="anna213@mail.com",
    remedy="refund",
    topic=["jacket", "late", "waiting", "delivery"],
    system="You answer complaints for Bluebird. Apologise and ask for the email address. For late parcels, then offer a "
    "full refund. Ask if the offer is okay.",
    complaint="I have been waiting 9 days too long for my jacket.",
)
BLENDER = scenario(
    detail="serial_number",
    value="SN-90417",
    remedy="repair",
    topic=["blender", "working", "dead", "warranty"],
    system="You work in customer service at Quayside. Ask the customer for the serial number. Policy for devices that "
    "fail under warranty: a free repair.",
    complaint="My blender stopped working after 9 days!",
)
FEE = scenario(
    detail="invoice_number",
    value="FA-13053",
    remedy="voucher",
    topic=["rug", "fee", "bill"],
    system="You help the customers of Kite & Key. Ask for their invoice number first. Then offer a gift voucher, as for "
    "all hidden fees.",
    complaint="There is a fee of 15 dollars on my rug that nobody mentioned!",
)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: Prompt
    talk: str
    success: bool
    low: float  # the value lies in [low, high], up to rounding
    high: float
    fault: str = ""

    @property
    def messages(self) -> list[Message]:
        roles = {"A": "assistant", "C": "user"}
        lines = [line.strip() for line in self.talk.splitlines() if line.strip()]
        spoken = [Message(roles[line[0]], line[2:].strip().replace("\\n", "\n")) for line in lines]
        return [*self.prompt.messages, *spoken]


def good(name: str, prompt: Prompt, talk: str) -> Case:
    return Case(name, prompt, talk, True, 1.0, 1.0)


def partial(name: str, prompt: Prompt, talk: str, low: float, high: float) -> Case:
    return Case(name, prompt, talk, False, low, high)


def cheat(name: str, prompt: Prompt, talk: str, fault: str) -> Case:
    return Case(name, prompt, talk, False, 0.0, 0.0, fault)


GOOD = [
    good("plain", KETTLE, """
        A: I'm sorry that your kettle arrived broken. Could you please give me your order number?
        C: It is KX-48213. What can you offer me?
        A: Thank you. We can send you a free replacement. Is that okay with you?
        C: Yes, that works for me. Thank you."""),
    good("apologies and new one", KETTLE, """
        A: My sincere apologies for the damaged kettle! What is the order number?
        C: KX-48213. So what do you offer?
        A: We'll ship a new one to you tomorrow. Would that work for you?
        C: Yes, please do that. Thanks."""),
    good("exchange", KETTLE, """
        A: We apologise for this. I just need your order number to look into it.
        C: Sure, KX-48213. What happens now?
        A: I can exchange it for you free of charge. Shall I go ahead?
        C: That sounds fair. Yes, go ahead."""),
    good("passive offer", KETTLE, """
        A: Oh no, sorry to hear that! Please send me the order number so I can check.
        C: It is KX-48213. What can you offer me?
        A: A replacement will be sent to you at once. Do you agree?
        C: Fine, I agree. Thanks for sorting it out."""),
    good("declines the wrong remedy", KETTLE, """
        A: I am so sorry about your kettle. May I have your order number?
        C: Here you go: KX-48213. What will you do for me?
        A: Unfortunately we can't refund it, but we will replace it for you. Is that all right?
        C: All right, yes. That settles it."""),
    good("accepts unasked", KETTLE, """
        A: I'm very sorry about the broken kettle. Can you tell me your order number?
        C: It is KX-48213. What can you offer me?
        A: Thank you, we will send you a replacement today.
        C: Okay, I accept that. Thank you."""),
    good("asks twice for agreement", KETTLE, """
        A: I'm sorry about this. Please provide your order number.
        C: KX-48213. So what do you offer?
        A: You will get a free replacement.
        C: Do you want to know if that is okay with me?
        A: Yes, please let me know if that is fine.
        C: Yes, that is what I wanted. Thank you."""),
    good("says yes when asked back", KETTLE, """
        A: I'm sorry about this. Please provide your order number.
        C: KX-48213. So what do you offer?
        A: I can offer you a new one.
        C: And are you asking me if I agree?
        A: Yes, I am.
        C: Yes, that is what I wanted. Thank you."""),
    good("offers in the policy's words", KETTLE, """
        A: I'm sorry about this. Please provide your order number.
        C: KX-48213. So what do you offer?
        A: We offer a free replacement for items that arrive broken. Is that okay?
        C: Yes, that is what I wanted. Thank you."""),
    good("slow start", KETTLE, """
        A: I'm sorry to hear about your broken kettle.
        C: Thanks. What do you need from me?
        A: I will need the order number from you.
        C: Sure, KX-48213. What happens now?
        A: Let me arrange a replacement. Does that sound good?
        C: That sounds fair. Yes, go ahead."""),
    good("apology with the offer", KETTLE, """
        A: Could you please give me your order number?
        C: Fine: KX-48213. I am still angry. So what do you offer?
        A: I apologize for the broken kettle. Would you like a replacement?
        C: Yes, please do that. Thanks."""),
    good("mail address", PARCEL, """
        A: I am sorry for the delay! Which email did you use?
        C: It is anna213@mail.com. What can you offer me?
        A: We would like to give you a full refund. Is this acceptable?
        C: Okay, I accept that. Thank you."""),
    good("money back", PARCEL, """
        A: We're really sorry about the late jacket. Can I get your e-mail address, please?
        C: anna213@mail.com. So what do you offer?
        A: We will give you your money back. Do you accept?
        C: Okay, I accept that. Thank you."""),
    good("refund you", PARCEL, """
        A: I do apologise for the long wait. Please tell me your email address.
        C: Sure, anna213@mail.com. What happens now?
        A: I'm going to refund you in full, if that is okay.
        C: Yes, that works for me. Thank you."""),
    good("repeats what the customer gave", PARCEL, """
        A: Sorry about the wait for your jacket. Could I have your email address?
        C: It is anna213@mail.com. What can you offer me?
        A: Thanks, I have found anna213@mail.com. Would you like a refund for the jacket?
        C: Yes, please do that. Thanks."""),
    good("fix it", BLENDER, """
        A: I'm sorry your blender stopped working. What's the serial number?
        C: SN-90417. So what do you offer?
        A: We can fix it for free. How does that sound?
        C: That sounds fair. Yes, go ahead."""),
    good("repair in time", BLENDER, """
        A: We regret that your blender is dead. Do you have the serial number at hand?
        C: It is SN-90417. What can you offer me?
        A: Great. We will repair it within 3-5 days at no cost. Would that suit you?
        C: Fine, I agree. Thanks for sorting it out."""),
    good("store credit", FEE, """
        A: I'm sorry about the fee. Could you share the invoice number?
        C: FA-13053. So what do you offer?
        A: As a sorry, I can offer you store credit. Are you happy with that?
        C: Okay, I accept that. Thank you."""),
    good("gift card", FEE, """
        A: Please accept our apologies for this trouble. What is your invoice number?
        C: Sure, FA-13053. What happens now?
        A: How about a gift card for you? I hope it's okay.
        C: Yes, that works for me. Thank you."""),
]  # fmt: skip

PARTIAL = [
    partial("asks as the customer would", PARCEL, """
        A: I'm sorry for the delay. Do you need my email?
        C: All right. Do you need my email address?""", 0, 0),
    partial("speaks of the customer, not to the customer", KETTLE, """
        A: I'm sorry about the kettle. Please provide the customer's order number.
        C: All right. Do you need my order number?""", 0.15, 0.15),
    partial("tells itself to ask", KETTLE, """
        A: I'm sorry about the kettle. Please ask the customer for the order number.
        C: All right. Do you need my order number?""", 0, 0),
    partial("wants the remedy for itself", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: I would like a replacement. Is that okay?
        C: And what can you offer me?""", 0.38, 0.38),
    partial("sends the customer away", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: You can ask for a replacement in another shop. Is that okay?
        C: And what can you offer me?""", 0.38, 0.38),
    partial("asks what to offer", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: Please let me know what kind of replacements I can offer.
        C: And what can you offer me?""", 0.38, 0.38),
    partial("asks for whatever", KETTLE, """
        A: I'm sorry about your kettle. Can you please provide more information?
        C: All right. Do you need my order number?""", 0.15, 0.15),
    partial("asks, but does not come to an end", KETTLE, """
        A: I'm sorry about your kettle. Can you please provide your order number so that I can
        C: KX-48213. So what do you offer?""", 0.105, 0.105),
    partial("sorry as a refusal", KETTLE, """
        A: I'm sorry, but I'm unable to assist with that.
        C: That does not help me. What do you need from me?""", 0.0, 0.0),
    partial("mourns the kettle", KETTLE, """
        A: I'm sorry for your loss.
        C: That does not help me. What do you need from me?""", 0.0, 0.0),
    partial("only an apology", KETTLE, """
        A: I'm sorry to hear that.
        C: Thanks. What do you need from me?
        A: Have a nice day.
        C: I give up. I will shop elsewhere.""", 0, 0),
    partial("only the question", KETTLE, """
        A: Could you please give me your order number?
        C: KX-48213. You could say sorry. What will you do for me?
        A: I will look at it some day.
        C: So what are you going to do for me?""", 0.08, 0.08),
    partial("asks for something else", KETTLE, """
        A: I'm sorry about that. Could you tell me your phone number?
        C: Why would you need that? What else do you need from me?""", 0.168, 0.168),
    partial("no apology at all", KETTLE, """
        A: What is your order number?
        C: KX-48213. You could say sorry. What will you do for me?
        A: We can send you a replacement. Is that okay?
        C: Yes, that works for me. Thank you.""", 0.3, 0.3),
    partial("apology after the deal", KETTLE, """
        A: What is your order number?
        C: KX-48213. You could say sorry. What will you do for me?
        A: We can send you a replacement.
        C: Do you want to know if that is okay with me?
        A: I'm sorry about your kettle. Is that okay?
        C: Yes, that works for me. Thank you.""", 0.85, 0.85),
    partial("the wrong remedy", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: We can give you a full refund. Is that okay?
        C: I do not want a full refund. Your own policy says otherwise.""", 0.364, 0.364),
    partial("the wrong remedy, then the right one", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: We can give you a full refund. Is that okay?
        C: I do not want a full refund. Your own policy says otherwise.
        A: Then we will send you a replacement. Does that work for you?
        C: Yes, that works for me. Thank you.""", 0.542, 0.542),
    partial("two remedies to choose from", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: Would you like a refund or a replacement?
        C: I do not want a full refund. Your own policy says otherwise.""", 0.364, 0.364),
    partial("promises first, asks later", KETTLE, """
        A: I'm sorry about your kettle. We will send you a replacement. Is that okay?
        C: How? You know nothing about my case yet. What do you need from me?
        A: I need your order number.
        C: KX-48213. So what do you offer?
        A: As I said, you will get a new one. Is it fine?
        C: Yes, that works for me. Thank you.""", 0.85, 0.85),
    partial("only a promise", KETTLE, """
        A: We will send you a replacement. Is that okay?
        C: How? You know nothing about my case yet. What do you need from me?""", 0.038, 0.039),
    partial("mentions the remedy, does not offer it", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: I understand that you want a replacement. I will ask whether a replacement is possible.
        C: And what can you offer me?""", 0.38, 0.38),
    partial("refuses the right remedy", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: We cannot send you a replacement. Is that okay?
        C: And what can you offer me?""", 0.3, 0.3),
    partial("mentions the detail, does not ask", KETTLE, """
        A: I'm sorry about your kettle. Thank you for your order number.
        C: All right. Do you need my order number?""", 0, 0),
    partial("does not need the detail", KETTLE, """
        A: I'm sorry about your kettle. We don't need your order number for that.
        C: All right. Do you need my order number?""", 0, 0),
    partial("the customer does not agree", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: We can send you a replacement.
        C: Do you want to know if that is okay with me?
        A: Goodbye for now and have a nice day.
        C: This leads nowhere. Goodbye.""", 0.663, 0.664),
    partial("speaks as the customer", KETTLE, """
        A: I ordered a kettle too and I'm sorry. What is my order number?
        C: Sorry, I do not follow you. Can you help me or not?""", 0.0, 0.0),
    partial("template holes", KETTLE, """
        A: Dear [Customer Name], I'm sorry about the kettle. What is your order number?
        C: Sorry, I do not follow you. Can you help me or not?""", 0.0, 0.0),
    partial("nothing but chatter", KETTLE, """
        A: Kettles are used to boil water in many kitchens of the world.
        C: I expected more. Do you want my order number or not?
        A: A cup of tea is nice in the morning.
        C: Forget it. I am done here.""", 0.0, 0.0),
]  # fmt: skip

OPENED = """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        """
CHEATS = [
    cheat("says nothing", KETTLE, "A: ", "empty"),
    cheat("says only signs", KETTLE, "A: ... !!! ???", "empty"),
    cheat("falls silent after a good start", KETTLE, OPENED + "A: ", "empty"),
    cheat("every keyword in one turn", KETTLE,
          "A: I'm sorry about your kettle. What is your order number? We can send a replacement. Is that okay?",
          "parroting"),
    cheat("every keyword in one turn, and the customer plays along", KETTLE, """
        A: I am sorry! Please give me your order number, and you will get a replacement, if that is okay?
        C: It is KX-48213. What can you offer me?
        A: We will send you a replacement. Is that okay?
        C: Yes, that works for me. Thank you.""", "parroting"),
    cheat("keywords without sentences", KETTLE, "A: Sorry apology kettle order number replacement okay agree.", "gibberish"),
    cheat("one word over and over", KETTLE, "A: sorry sorry sorry sorry sorry sorry sorry", "gibberish"),
    cheat("one phrase over and over", KETTLE,
          "A: I'm sorry for that. I'm sorry for that. I'm sorry for that. I'm sorry for that. I'm sorry.", "gibberish"),
    cheat("words in no order", KETTLE, "A: I'm sorry the a order number your is? We will the replacement of and my okay?", "gibberish"),
    cheat("signs and numbers", KETTLE, "A: I'm sorry #### $$$$ 1 2 3 %%%% &&&& //// **** ++++ ==== 4 5 6", "gibberish"),
    cheat("another script", KETTLE, "A: 对不起 您的 订单号 是 什么 sorry 我们 会 给 您 换 一个 新的", "gibberish"),
    cheat("reads out the policy", KETTLE,
          "A: For items that arrive broken we offer a free replacement. First ask for the order number.", "echo"),
    cheat("reads out the whole prompt", KETTLE, """
        A: I'm sorry. You are a customer service agent of Northwind. For items that arrive broken we offer a free replacement.
        """, "echo"),
    cheat("gives the complaint back", KETTLE, "A: My kettle arrived broken. I am really upset.", "echo"),
    cheat("gives a short complaint back", BLENDER, "A: My blender stopped working.", "echo"),
    cheat("gives the customer's question back", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: It is KX-48213. Can you offer me a replacement?
        A: Can you offer me a replacement?""", "echo"),
    cheat("gives the customer's answer back", PARCEL, """
        A: I'm sorry for the delay! Which email did you use?
        C: It is anna213@mail.com. Not even an apology? What can you offer me?
        A: It is anna213@mail.com. Not even an apology? What can you offer me?""", "echo"),
    cheat("lists every remedy", KETTLE, OPENED + """
        A: We can offer you a refund, a replacement, a repair or a voucher. Is that okay?
        C: Yes, that works for me. Thank you.""", "listing"),
    cheat("lists remedies over sentences", KETTLE, OPENED + """
        A: You can have a replacement. You can have a refund. You can have a discount. Is that okay?
        C: Yes, that works for me. Thank you.""", "listing"),
    cheat("asks for every detail", KETTLE,
          "A: I'm sorry. Please give me your order number, email address, phone number and serial number.", "listing"),
    cheat("lists remedies in vague words", KETTLE, OPENED + """
        A: We can send a new one, fix it, lower the price and give you coupons. Is that okay?
        C: Yes, that works for me. Thank you.""", "listing"),
    cheat("invents an amount", PARCEL, """
        A: I'm sorry for the delay! Which email did you use?
        C: It is anna213@mail.com. What can you offer me?
        A: We can offer you a refund of $25. Is that okay?
        C: Okay, I accept that. Thank you.""", "invention"),
    cheat("invents a percentage", FEE, "A: I'm sorry about the fee. We can offer you 45% off.", "invention"),
    cheat("says the same again", KETTLE, """
        A: I'm sorry about your kettle. What is your order number?
        C: KX-48213. So what do you offer?
        A: I'm sorry about your kettle. What is your order number?""", "repetition"),
    cheat("says nearly the same again", KETTLE, """
        A: I'm sorry about your kettle, we will do all that we can to help you.
        C: Thanks. What do you need from me?
        A: I'm sorry about your kettle, we will do all that we can to help you today.""", "repetition"),
    cheat("plays both parts", KETTLE,
          "A: I'm sorry. What is your order number?\\nCustomer: It is KX-1.\\nWe will replace it.", "impersonation"),
    cheat("plays the user", KETTLE, "A: I'm sorry. What is your order number? User: Yes, that works for me.", "impersonation"),
    cheat("plays the customer in bold", KETTLE, "A: I'm sorry about that.\\n**Customer:** Yes, I agree.", "impersonation"),
    cheat("invents an order number", KETTLE, "A: I'm sorry about your kettle. I see your order number is KX-77120.", "invention"),
    cheat("invents a number of digits", KETTLE, "A: I'm sorry about that. Is your order number 448120?", "invention"),
    cheat("invents a mail address", PARCEL, "A: I'm sorry for the delay. Please write to help@bluebird.com.", "invention"),
    cheat("names the number before it was given", KETTLE, "A: I'm sorry. Is KX-48213 your order number?", "invention"),
    cheat("cheats at the very end", KETTLE, OPENED + """
        A: We can send you a replacement. Is that okay?
        C: Yes, that works for me. Thank you.
        A: Customer: thank you so much, you are the best.""", "impersonation"),
]  # fmt: skip

ALL = [*GOOD, *PARTIAL, *CHEATS]
