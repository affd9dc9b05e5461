//! Sets of moments, as spans in order that do not touch.

/// Each from a beginning to an end.
pub(crate) type Spans = Vec<(u64, u64)>;

pub(crate) fn union(mut spans: Spans) -> Spans {
    spans.retain(|(from, until)| from < until);
    spans.sort_unstable();
    let mut whole: Spans = Vec::new();
    for (from, until) in spans {
        match whole.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => whole.push((from, until)),
        }
    }
    whole
}

/// What is in `these` and not in `those`; both are unions.
pub(crate) fn without(these: &Spans, those: &Spans) -> Spans {
    let (mut left, mut first) = (Vec::new(), 0);
    for &(mut from, until) in these {
        while those.get(first).is_some_and(|hole| hole.1 <= from) {
            first += 1;
        }
        for hole in those[first..].iter().take_while(|hole| hole.0 < until) {
            if from < hole.0 {
                left.push((from, hole.0));
            }
            from = from.max(hole.1);
        }
        if from < until {
            left.push((from, until));
        }
    }
    left
}

/// The same spans, each cut at those of the `moments` that fall into it; these are in order.
pub(crate) fn cut(spans: &Spans, moments: &[u64]) -> Spans {
    let mut pieces = Vec::new();
    for &(mut from, until) in spans {
        let first = moments.partition_point(|moment| *moment <= from);
        for moment in moments[first..].iter().copied().take_while(|moment| *moment < until) {
            pieces.push((from, moment));
            from = moment;
        }
        pieces.push((from, until));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_put_together_and_taken_apart() {
        assert_eq!(union(vec![(5, 9), (1, 3), (3, 4), (8, 12), (7, 7)]), [(1, 4), (5, 12)]);
        assert_eq!(
            without(&vec![(1, 10), (20, 30)], &vec![(0, 2), (4, 5), (9, 22), (29, 40)]),
            [(2, 4), (5, 9), (22, 29)]
        );
        assert_eq!(without(&vec![(1, 3)], &vec![]), [(1, 3)]);
        assert_eq!(
            cut(&vec![(1, 10), (20, 30)], &[1, 4, 10, 15, 25]),
            [(1, 4), (4, 10), (20, 25), (25, 30)]
        );
    }
}
