//! Taking a lock from its holder in `distlock top`: only after a yes, and only from the holder that was shown.

use distlock::LockLost;

use super::top;
use crate::{
    kit::{SECOND, UnwrapReleased as _, get, lease, lost, manager, waiter},
    support::RedisServer,
};

#[test]
fn only_a_yes_takes_a_lock_away_and_its_holder_learns_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("orders:42", &lease(9 * SECOND)).unwrap();
    let mut top = top(&server);
    top.until_shown("orders:42");
    for no in ["n", "q", "Y", "\r", " "] {
        top.press("f");
        let screen = top.until_shown("? y/n");
        let question = format!("(pid {})? y/n", std::process::id());
        assert!(screen.contains("Release orders:42, held by ") && screen.contains(&question), "{screen}");
        top.press(no);
        top.until_gone("y/n");
    }
    guard.ensure_held().unwrap();
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(guard.id().as_str()));
    top.press("F");
    top.until_shown("? y/n");
    top.press("y");
    top.until_shown("released orders:42");
    assert_eq!(lost(&guard), LockLost::Gone);
    top.until_shown("no lock is held");
}

#[test]
fn a_lock_goes_to_the_next_in_line() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("orders:42", &lease(9 * SECOND)).unwrap();
    let waiting = waiter(&server, &mgr, "orders:42");
    let mut top = top(&server);
    top.until_shown("1 waiter,");
    top.press("\r");
    top.until_shown(guard.id().as_str());
    top.press("f");
    top.until_shown("? y/n");
    top.press("y");
    let next = waiting.join().unwrap().unwrap();
    assert!(matches!(lost(&guard), LockLost::Taken { by, .. } if by.id() == next.id().as_str()));
    top.until_shown("released orders:42");
    top.until_shown(next.id().as_str());
    assert!(next.is_held());
}

#[test]
fn who_got_the_lock_while_the_question_stood_keeps_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.until_shown("orders:42");
    top.press("f");
    top.until_shown("? y/n");
    guard.release().unwrap().unwrap_released();
    let next = mgr.lock("orders:42").unwrap();
    top.press("y");
    top.until_shown("left alone: orders:42 is held by another now");
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(next.id().as_str()));
    assert!(next.is_held());
    drop(next);
    top.until_shown("no lock is held");
}

#[test]
fn a_lock_without_a_holder_and_a_server_that_is_away_are_told() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.until_shown("orders:42");
    top.press("f");
    top.until_shown("? y/n");
    guard.release().unwrap().unwrap_released();
    top.press("y");
    top.until_shown("orders:42 had no holder any more");
    let _guard = mgr.lock("mail").unwrap();
    top.until_shown("mail");
    server.kill();
    top.until_shown("NO ANSWER");
    top.press("f");
    top.until_shown("? y/n");
    top.press("y");
    top.until_shown("could not release mail: ");
}

#[test]
fn pasted_text_releases_nothing() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.until_shown("orders:42");
    top.press("\x1b[200~fyyy\x1b[201~");
    top.press("f");
    top.until_shown("? y/n");
    top.press("\x1b[200~y\x1b[201~");
    top.press("n");
    top.until_gone("y/n");
    top.press("p");
    top.until_shown("PAUSED");
    assert!(guard.is_held());
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(guard.id().as_str()));
}
