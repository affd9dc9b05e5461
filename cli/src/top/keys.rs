//! Maps keys to actions, depending on what is open. Pure.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What receives the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The table.
    Browse,
    /// The line with the filter.
    Filter,
    /// The details of one lock.
    Inspect,
    /// The question whether to release a lock.
    Confirm,
    Help,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Move(Movement),
    NextColumn,
    Reverse,
    Filter,
    Type(char),
    Backspace,
    /// Clear the filter.
    Clear,
    /// Keep the filter, and return to the table.
    Accept,
    Inspect,
    Release,
    Yes,
    No,
    Pause,
    Slower,
    Faster,
    Help,
    /// Close what is open; in the table, quit.
    Back,
    Quit,
    Interrupt,
    Suspend,
    Redraw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Movement {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

pub(crate) fn action_for(mode: Mode, key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match (mode, key.code) {
            (_, KeyCode::Char('c')) => Some(Action::Interrupt),
            (_, KeyCode::Char('z')) => Some(Action::Suspend),
            (_, KeyCode::Char('l')) => Some(Action::Redraw),
            (Mode::Filter, KeyCode::Char('u')) => Some(Action::Clear),
            // Some terminals send this for Backspace.
            (Mode::Filter, KeyCode::Char('h')) => Some(Action::Backspace),
            // Everything but a plain `y` means no.
            (Mode::Confirm, _) => Some(Action::No),
            _ => None,
        };
    }
    match mode {
        Mode::Browse => browse_action(key.code),
        Mode::Filter => filter_action(key.code),
        Mode::Inspect => inspect_action(key.code),
        Mode::Confirm => {
            Some(if key.code == KeyCode::Char('y') { Action::Yes } else { Action::No })
        }
        Mode::Help => Some(Action::Back),
    }
}

fn browse_action(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char('s') => Action::NextColumn,
        KeyCode::Char('r') => Action::Reverse,
        KeyCode::Char('/') => Action::Filter,
        KeyCode::Enter => Action::Inspect,
        KeyCode::Char('f' | 'F') => Action::Release,
        KeyCode::Char('p') => Action::Pause,
        KeyCode::Char('+') => Action::Slower,
        KeyCode::Char('-') => Action::Faster,
        KeyCode::Char('?' | 'h') => Action::Help,
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Esc => Action::Back,
        key => return movement(key).map(Action::Move),
    })
}

fn filter_action(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char(letter) => Action::Type(letter),
        KeyCode::Backspace => Action::Backspace,
        KeyCode::Enter => Action::Accept,
        KeyCode::Esc => Action::Back,
        key => return movement(key).map(Action::Move),
    })
}

fn inspect_action(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char('f' | 'F') => Action::Release,
        KeyCode::Char('q') | KeyCode::Esc | KeyCode::Enter => Action::Back,
        key => return movement(key).map(Action::Move),
    })
}

fn movement(key: KeyCode) -> Option<Movement> {
    Some(match key {
        KeyCode::Up | KeyCode::Char('k') => Movement::Up,
        KeyCode::Down | KeyCode::Char('j') => Movement::Down,
        KeyCode::PageUp => Movement::PageUp,
        KeyCode::PageDown => Movement::PageDown,
        KeyCode::Home | KeyCode::Char('g') => Movement::Home,
        KeyCode::End | KeyCode::Char('G') => Movement::End,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(mode: Mode, code: KeyCode) -> Option<Action> {
        action_for(mode, KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn only_lower_case_y_confirms() {
        assert_eq!(plain(Mode::Confirm, KeyCode::Char('y')), Some(Action::Yes));
        for code in [KeyCode::Enter, KeyCode::Esc, KeyCode::Up, KeyCode::F(1)] {
            assert_eq!(plain(Mode::Confirm, code), Some(Action::No), "{code:?}");
        }
        for letter in ('\0'..='\u{ff}').filter(|letter| *letter != 'y') {
            assert_eq!(plain(Mode::Confirm, KeyCode::Char(letter)), Some(Action::No), "{letter:?}");
        }
        let with =
            |modifiers| action_for(Mode::Confirm, KeyEvent::new(KeyCode::Char('y'), modifiers));
        assert_eq!(with(KeyModifiers::CONTROL), Some(Action::No));
    }

    #[test]
    fn control_keys_work_in_every_mode() {
        for mode in [Mode::Browse, Mode::Filter, Mode::Inspect, Mode::Confirm, Mode::Help] {
            for (letter, meaning) in
                [('c', Action::Interrupt), ('z', Action::Suspend), ('l', Action::Redraw)]
            {
                let key = KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
                assert_eq!(action_for(mode, key), Some(meaning), "{mode:?}");
            }
        }
    }

    #[test]
    fn letters_are_typed_into_open_filter() {
        for letter in ['q', 'f', 'y', 'j', '/', '+', '漢'] {
            assert_eq!(plain(Mode::Filter, KeyCode::Char(letter)), Some(Action::Type(letter)));
        }
        assert_eq!(plain(Mode::Filter, KeyCode::Down), Some(Action::Move(Movement::Down)));
        assert_eq!(plain(Mode::Filter, KeyCode::Esc), Some(Action::Back));
    }

    #[test]
    fn table_keys_have_distinct_actions() {
        let letters = ['s', 'r', '/', 'f', 'p', '+', '-', '?', 'q', 'j', 'k'];
        let meanings: Vec<_> = letters
            .iter()
            .filter_map(|letter| plain(Mode::Browse, KeyCode::Char(*letter)))
            .collect();
        assert_eq!(meanings.len(), letters.len());
        for (at, meaning) in meanings.iter().enumerate() {
            assert!(!meanings[..at].contains(meaning), "{meaning:?}");
        }
        assert_eq!(plain(Mode::Browse, KeyCode::Char('F')), Some(Action::Release));
        assert_eq!(plain(Mode::Browse, KeyCode::Char('x')), None);
    }

    #[test]
    fn key_release_is_ignored() {
        let key =
            KeyEvent::new_with_kind(KeyCode::Char('y'), KeyModifiers::NONE, KeyEventKind::Release);
        assert_eq!(action_for(Mode::Confirm, key), None);
    }
}
