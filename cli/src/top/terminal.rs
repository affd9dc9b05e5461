//! `Screen`: takes over the terminal, and restores it in every case.

use std::{
    cell::Cell,
    io::{self, IsTerminal as _, Stdout, stdin, stdout},
    mem::ManuallyDrop,
    panic, process,
    sync::Once,
};

use parking_lot::ReentrantMutex;
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor, event, execute,
        terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
    },
};

/// The exit code of a process that panicked.
const PANIC_EXIT_CODE: i32 = 101;

/// Whether the terminal is taken over. The lock is held while something is written to the terminal.
/// It is reentrant, so that a thread that panics while drawing can still restore the terminal.
static ACQUIRED: ReentrantMutex<Cell<bool>> = ReentrantMutex::new(Cell::new(false));

/// The terminal in raw mode with the alternate screen. It is restored on drop, and if any thread
/// panics.
pub(crate) struct Screen {
    /// Never dropped, because its `drop` shows the cursor, and reports a failure of that in a way
    /// that panics if standard error is closed.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>,
}

/// Whether standard input and output are terminals.
pub(crate) fn has_terminal() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

impl Screen {
    pub(crate) fn enter() -> io::Result<Screen> {
        restore_on_panic();
        acquire()?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| restore())?;
        Ok(Screen { terminal: ManuallyDrop::new(terminal) })
    }

    pub(crate) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let acquired = ACQUIRED.lock();
        if acquired.get() {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// Makes the next drawing redraw the whole screen.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        // `Terminal::clear` queries the cursor position, and the thread that reads keys would get
        // the reply.
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }

    /// Restores the terminal while `away` runs.
    pub(crate) fn suspend(&mut self, away: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        restore();
        away()?;
        acquire()?;
        self.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn acquire() -> io::Result<()> {
    let acquired = ACQUIRED.lock();
    acquired.set(true);
    // Bracketed paste keeps pasted text from being taken for keys, such as the `y` that confirms a
    // release.
    enable_raw_mode()
        .and_then(|()| {
            execute!(stdout(), EnterAlternateScreen, event::EnableBracketedPaste, cursor::Hide)
        })
        .inspect_err(|_| restore())
}

/// Restores the terminal if it is taken over. Errors are ignored, because a terminal that is gone
/// needs nothing.
fn restore() {
    let acquired = ACQUIRED.lock();
    if acquired.replace(false) {
        let _ =
            execute!(stdout(), event::DisableBracketedPaste, LeaveAlternateScreen, cursor::Show);
        let _ = disable_raw_mode();
    }
}

/// Makes a panic of any thread restore the terminal, where its message can be read, and end the
/// process, because without that thread the screen would be out of date.
fn restore_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let acquired = ACQUIRED.lock();
            let was_acquired = acquired.get();
            restore();
            report(info);
            if was_acquired {
                process::exit(PANIC_EXIT_CODE);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::{env, io::Read as _, thread};

    use portable_pty::{CommandBuilder, PtySize, native_pty_system};

    use super::*;

    /// Names the thread that must panic, for a process of this test.
    const ROLE: &str = "DISTLOCK_TEST_PANIC";

    fn panics(role: &str) -> ! {
        let mut screen = Screen::enter().unwrap();
        screen.draw(|frame| frame.render_widget("picture", frame.area())).unwrap();
        match role {
            "drawing" => screen.draw(|_| panic!("on purpose")).unwrap(),
            _ => drop(thread::spawn(|| panic!("on purpose")).join()),
        }
        unreachable!("the panic ends the process");
    }

    #[test]
    fn panic_message_appears_on_restored_terminal() {
        if let Ok(role) = env::var(ROLE) {
            panics(&role);
        }
        for role in ["drawing", "another thread"] {
            let pty = native_pty_system().openpty(PtySize::default()).unwrap();
            let before = format!("{:?}", pty.master.get_termios());
            let mut command = CommandBuilder::new(env::current_exe().unwrap());
            let test = thread::current().name().map(str::to_owned).unwrap();
            command.args([&test, "--exact", "--nocapture"]);
            command.env(ROLE, role);
            let mut child = pty.slave.spawn_command(command).unwrap();
            drop(pty.slave);
            let (mut output, mut output_text) =
                (pty.master.try_clone_reader().unwrap(), Vec::new());
            // On Linux, reading fails at the end.
            let _ = output.read_to_end(&mut output_text);
            let output_text = String::from_utf8_lossy(&output_text).into_owned();
            assert_eq!(
                child.wait().unwrap().exit_code(),
                PANIC_EXIT_CODE.unsigned_abs(),
                "{output_text}"
            );
            let position = |text: &str| {
                output_text.find(text).unwrap_or_else(|| panic!("no {text:?} in {output_text:?}"))
            };
            assert!(position("picture") < position("\u{1b}[?1049l"), "{output_text:?}");
            assert!(
                position("\u{1b}[?1049l") < position("on purpose")
                    && position("\u{1b}[?25h") < position("on purpose"),
                "{output_text:?}"
            );
            assert!(
                !output_text[position("on purpose")..].contains("picture"),
                "drawn over: {output_text:?}"
            );
            assert_eq!(format!("{:?}", pty.master.get_termios()), before);
        }
    }
}
