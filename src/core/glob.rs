//! Redis patterns, as `SCAN MATCH` has them.

/// Whether `text` matches the pattern: `*` any bytes, `?` one byte, `[a-c]` or `[^a-c]` one of or
/// none of these bytes, `\` the next byte itself.
pub(crate) fn matches(mut pattern: &[u8], mut text: &[u8]) -> bool {
    // The last `*`, and what has been tried to match after it.
    let mut star: Option<(&[u8], &[u8])> = None;
    loop {
        match one(pattern, text) {
            Step::Star(rest) => {
                star = Some((rest, text));
                pattern = rest;
            }
            Step::Matched(rest) => (pattern, text) = (rest, &text[1..]),
            Step::End => return true,
            Step::Differs => match star {
                Some((rest, [_, shorter @ ..])) => {
                    star = Some((rest, shorter));
                    (pattern, text) = (rest, shorter);
                }
                _ => return false,
            },
        }
    }
}

/// Returns why no name can match the pattern; `None` if some can.
pub(crate) fn why_no_match(pattern: &str) -> Option<&'static str> {
    if pattern.is_empty() {
        return Some("it is empty; * matches all names");
    }
    let mut rest = pattern.as_bytes();
    loop {
        rest = match rest {
            [] => return None,
            [b'\\', _, rest @ ..] => rest,
            [b'[', class @ ..] => match after_class(class) {
                None => return Some("a [ has no closing ]; write \\[ for a [ in a name"),
                Some(_) if class.first() == Some(&b']') => {
                    return Some("[] is an empty set; write \\[ for a [ in a name");
                }
                Some(rest) => rest,
            },
            [_, rest @ ..] => rest,
        };
    }
}

/// The pattern after the class that begins here; `None` if the class is not closed.
fn after_class(mut class: &[u8]) -> Option<&[u8]> {
    loop {
        class = match class {
            [] | [b'\\'] => return None,
            [b']', rest @ ..] => return Some(rest),
            [b'\\', _, rest @ ..] | [_, b'-', _, rest @ ..] | [_, rest @ ..] => rest,
        };
    }
}

enum Step<'a> {
    /// A `*`, and the pattern after it.
    Star(&'a [u8]),
    /// The first byte matches; the pattern after it.
    Matched(&'a [u8]),
    Differs,
    /// Pattern and text end here.
    End,
}

/// Compares one byte.
fn one<'a>(pattern: &'a [u8], text: &[u8]) -> Step<'a> {
    let Some(byte) = text.first() else {
        return match pattern {
            [b'*', rest @ ..] => Step::Star(rest),
            [] => Step::End,
            _ => Step::Differs,
        };
    };
    let (is_match, rest) = match pattern {
        [b'*', rest @ ..] => return Step::Star(rest),
        [b'?', rest @ ..] => (true, rest),
        [b'[', rest @ ..] => in_class(rest, *byte),
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => (literal == byte, rest),
        [] => return Step::Differs,
    };
    if is_match { Step::Matched(rest) } else { Step::Differs }
}

/// Whether the class that begins here has this byte, and the pattern after the class.
fn in_class(class: &[u8], byte: u8) -> (bool, &[u8]) {
    let (negated, mut rest) = match class {
        [b'^', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut found = false;
    loop {
        rest = match rest {
            [] => return (found != negated, rest),
            [b']', rest @ ..] => return (found != negated, rest),
            [b'\\', literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
            [first, b'-', last, rest @ ..] => {
                found |= (*first.min(last)..=*first.max(last)).contains(&byte);
                rest
            }
            [literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same list as in the test of the command.
    #[test]
    fn pattern_that_matches_no_name_has_a_reason() {
        for pattern in ["", "[", "a[b", "[]", "x[]y", "[\\]", "[a-]", "\\\\[", "[a][", "[^"] {
            assert!(why_no_match(pattern).is_some(), "{pattern}");
        }
        for pattern in
            ["*", "?", "\\[", "[a]", "[a-c]*", "[^]", "[^a]", "[\\]]", "[[]", "a]", "[a-]]", "\\"]
        {
            assert_eq!(why_no_match(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn patterns_match_as_on_a_server() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("lock:*", "lock:", true),
            ("lock:*", "lock:orders:42", true),
            ("lock:*", "loc", false),
            ("*a*b", "xaxbxab", true),
            ("*a*b", "xaxbxa", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[c-a]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[^a-c]x", "dx", true),
            ("[^a-c]x", "ax", false),
            ("[ab", "b", true),
            ("[\\]]", "]", true),
            ("\\*a", "*a", true),
            ("\\*a", "ba", false),
            ("a\\", "a\\", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
