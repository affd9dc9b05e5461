//! Sets of times, as sorted intervals that do not touch.

/// Start and end of each interval.
pub(crate) type Intervals = Vec<(u64, u64)>;

pub(crate) fn union(mut intervals: Intervals) -> Intervals {
    intervals.retain(|(from, until)| from < until);
    intervals.sort_unstable();
    let mut wgap: Intervals = Vec::new();
    for (from, until) in intervals {
        match wgap.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => wgap.push((from, until)),
        }
    }
    wgap
}

/// Returns the times that are in `these` and not in `those`. Both must be unions.
pub(crate) fn difference(these: &Intervals, those: &Intervals) -> Intervals {
    let (mut left, mut first) = (Vec::new(), 0);
    for &(mut from, until) in these {
        while those.get(first).is_some_and(|gap| gap.1 <= from) {
            first += 1;
        }
        for gap in those[first..].iter().take_while(|gap| gap.0 < until) {
            if from < gap.0 {
                left.push((from, gap.0));
            }
            from = from.max(gap.1);
        }
        if from < until {
            left.push((from, until));
        }
    }
    left
}

/// Splits the intervals at the `moments`, which must be sorted.
pub(crate) fn split_at(intervals: &Intervals, moments: &[u64]) -> Intervals {
    let mut pieces = Vec::new();
    for &(mut from, until) in intervals {
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
    fn intervals_are_merged_subtracted_and_split() {
        assert_eq!(union(vec![(5, 9), (1, 3), (3, 4), (8, 12), (7, 7)]), [(1, 4), (5, 12)]);
        assert_eq!(
            difference(&vec![(1, 10), (20, 30)], &vec![(0, 2), (4, 5), (9, 22), (29, 40)]),
            [(2, 4), (5, 9), (22, 29)]
        );
        assert_eq!(difference(&vec![(1, 3)], &vec![]), [(1, 3)]);
        assert_eq!(
            split_at(&vec![(1, 10), (20, 30)], &[1, 4, 10, 15, 25]),
            [(1, 4), (4, 10), (20, 25), (25, 30)]
        );
    }
}
