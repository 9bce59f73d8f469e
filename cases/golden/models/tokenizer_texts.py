"""The texts on which tokenizers are compared: prose in many scripts, and fragments that generated texts are made of."""

PROSE = [
    "All human beings are born free and equal in dignity and rights. They're endowed with reason & conscience, and shouldn't act "
    "otherwise -- that's what we've said; I'd say it's 100% true (or 99.9%).\n\n  \"Quoted,\" he'll add: 'single' — dash…\n",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Größe, Übermaß, ÄÖÜ äöüß; 3,14 €.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. L'œuvre, ça, garçon, naïve, Noël, aujourd'hui.",
    "Todos los seres humanos nacen libres e iguales. ¿Qué pasó? ¡Mañana, niño! Pingüino.",
    "Wszyscy ludzie rodzą się wolni i równi: zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy. Árvíztűrő tükörfúrógép.",
    "Bütün insanlar hür doğar: İstanbul, ığdır, şemsiye, çay. Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах. Їжак, ґанок, ўсё, Љубав, Ѝ.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι· ἐν ἀρχῇ ἦν ὁ λόγος. Բոլոր մարդիկ ծնվում են ազատ։ ყველა ადამიანი იბადება თავისუფალი.",
    "כל בני האדם נולדו בני חורין ושווים בערכם. שָׁלוֹם עֲלֵיכֶם. يولد جميع الناس أحرارًا متساوين في الكرامة. السَّلَامُ عَلَيْكُمْ ٱلْعَٰلَمِينَ ۱۲۳ ٤٥٦",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है। क्षत्रिय, हिन्दी १२३. সমস্ত মানুষ স্বাধীনভাবে। ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ। પ્રતિષ્ઠા",
    "மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர். ప్రతిపత్తి ಎಲ್ಲಾ ಮಾನವರೂ സ്വാതന്ത്ര്യം සියලු මනුෂ්‍යයෝ",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน น้ำ กำลัง ๑๒๓ ມະນຸດທຸກຄົນ លោក​ជនទាំងអស់ လူတိုင်းသည် ཨའི་བུ་ཚན་",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心！「引用」《书名》　全角　空格。２０２４年１２月３１日",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。カタカナ、ｶﾞｷﾞｸﾞ、がぎぐ、か\u3099、々〆〇",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8 ㄱㄴㄷ",
    "ሰው ሁሉ ነጻ ይወለዳል። ᎣᏏᏲ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᚠᚢᚦᚨᚱᚲ ⲁⲛⲟⲕ 𐌲𐌿𐍄 𐎀𐎁 𓀀𓁐 𒀀𒁀 ⵜⴰⵎⴰⵣⵉⵖⵜ ߒߞߏ ꦗꦮ ᬩᬮᬶ",
    "def f(x):\n\treturn x**2  # comment\r\n\r\n    if x != 0x1F:   \n        print(f\"{x:>10}\\n\")\n\n\n\t\t}\n#include <vector>\nint main() { return a[i++]->b; }\r",
    "https://example.org/path?q=1&r=%20#frag user@mail.test C:\\dir\\file.txt 192.168.0.1 1,234,567.89 1e-9 -0.5 ½ ² ³ ① Ⅷ ٣ ൰",
    "😀😃👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵👨🏿‍🚀❤️‍🔥#️⃣ ☺︎ ♥ ✓ → ∑∫√≠≤ αβγ 𝐀𝑏𝒞 𝟘𝟙 ﬁ ﬂ ﬆ Ⅳ ℵ Å Ω K ™ © № ㎏ ㍿",
    "e\u0301 é a\u0323\u0302 ậ a\u0302\u0323 q\u0307\u0323 q\u0323\u0307 o\u0308\u0304 ȫ s\u0323\u0307 ṩ \u0301start n\u0303 \u212b \u2126 \u0958 \u2adc \u1e9b\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘",
    "don't DON'T I'M we'Re they'VE he'LL it'S 'tis ''s 's' x'd 'ſx O'Neill rock'n'roll '\u2019s it\u2019s ’t",
    " a  b   c    d\t e\t\tf \n g\n\nh\r\ni \r\n \r\n j\u00a0k\u00a0\u00a0l\u2003m\u3000n\u0085o\u2028p\u2029q\u200br\ufeffs\u00adt\u180eu  ",
    "\x00\x01\x02\x1b[31m\x07\x7f\x80\x9f\ufffd\uffff\U0010ffff\ue000\U000f0000 \u202etxet\u202c \u2066x\u2069",
    "<|endoftext|>text<|im_start|>user\nHi <|im_end|>\n<tool_call> {\"a\":1} </tool_call><|fim<|fim_pad|>  <keep>  x  <keep>\n\n<|endoftext|><|endoftext|",
    "Cafe\u0301 café CAFÉ <caf\u00e9> <cafe\u0301> \u1e9e ß İ i̇ ǆ ǅ",
]

HOSTILE = [
    "", " ", "\n", "  ", "\r\n\r\n", "\t \t", "a", "'", "''", "0", "00000000000000000000", "\u0301", "\u0301\u0301\u0301", " \u0301x",
    "a" * 3000, "ab" * 1500, " " * 2000, " " * 500 + "x", "\n" * 1000, " \n" * 500, "!" * 2000, "!?" * 500 + "\r\n", "1" * 500, "é" * 1000,
    "e\u0301" * 500, "中" * 1000, "😀" * 300, "\u0300\u0301\u0316\u0334" * 300, "가" * 500, "\u1100\u1161" * 300, "the " * 500, "x'" * 500,
    "<|" * 500, "<|endoftext|>" * 100, "A\u030a" * 200, "\u0334\u0316\u0301" * 200 + "x", "\u3000" * 300 + "。", "-" * 999 + "\n\n",
]

WORDS = ("the The THE of and ing tion un re hello Hello world über straße naïve œuvre qué niño żółć ďábel ırmak İzmir người đường мир Мир їжак "
         "слово люди Ελλάδα λόγος ἀρχῇ ազատ თავისუფალი שלום שָׁלוֹם سلام السَّلَام हिन्दी क्ष বাংলা ਪੰਜਾਬੀ ગુજરાતી தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල ไทย น้ำ ລາວ "
         "ខ្មែរ မြန်မာ བོད ሰላም ᎣᏏᏲ ᐃᓄᒃ 中文 汉字 漢字 日本語 ひらがな カタカナ ｶﾞ 한국어 가나다 𐌲𐌿𐍄 𓀀 𝐀𝐁 ﬁ ﬆ ß ẞ ſ ǆ ª º ʼn µ Å").split()
PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u2003", "\u3000", "\u0085", "\u2028", "\u200b", "\u200d", "\ufeff", "\u00ad",
    ".", ",", "!", "?", "...", "…", "-", "--", "—", "'", "\"", "’", "(", ")", "[", "]", "{", "}", "<", ">", "<|", "|>", "/", "\\", "#", "$", "%",
    "&", "*", "+", "=", "@", "^", "_", "`", "~", "|", "。", "、", "「", "」", "！", "？", "¿", "¡", "«", "»", "€", "£", "№", "→", "∑", "√",
    "'s", "'S", "'t", "'re", "'RE", "'ve", "'m", "'ll", "'Ll", "'d", "'ſ", "'x", "'r", "'v", "'l",
    "0", "1", "42", "007", "3.14", "1,000", "١٢", "१२", "๑", "２", "½", "²", "①", "Ⅷ", "〇", "𝟙", "൰",
    "\u0301", "\u0300", "\u0323", "\u0307", "\u0308", "\u0327", "\u0334", "\u0345", "\u093c", "\u094d", "\u05b0", "\u064e", "\u0e38", "\u3099", "\u20dd",
    "\u1100", "\u1161", "\u11a8", "\u1112", "e\u0301", "a\u0323\u0302", "s\u0307\u0323", "\u212b", "\u2126", "\u0958", "\u2adc", "\u1e9b\u0323", "\u0344",
    "😀", "👍🏽", "👩‍👧", "🏳️‍🌈", "🇩🇪", "❤️", "#️⃣", "\ufe0f", "🏽", "\x00", "\x1b", "\x7f", "\u0080", "\ufffd", "\ue000", "\U0010ffff", "\u0378",
    "\U000105c0", "\u1c89", "\U00010d4a", "\U0002ebf0", "\u0897", "\U00010d40", "<|endoftext|>", "<|im_start|>", "<tool_call>", "<keep>", "<café>",
    "<cafe\u0301>", "<|fim", "<|fim_pad|>",
]
# Words stand twice, so that generated texts are not mostly signs.
FRAGMENTS = WORDS + WORDS + [" " + w for w in WORDS] + PIECES
