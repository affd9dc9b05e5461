//! Releases in `distlock top`: only after confirmation, and only from the holder that was shown.

use distlock::LockLost;

use super::top;
use crate::{
    helpers::{
        SECOND, UnwrapReleased as _, expect_loss, get, manager, spawn_queued_waiter, with_ttl,
    },
    support::RedisServer,
};

#[test]
fn release_needs_confirmation_and_holder_learns_of_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("orders:42", &with_ttl(9 * SECOND)).unwrap();
    let mut top = top(&server);
    top.wait_shown("orders:42");
    for no in ["n", "q", "Y", "\r", " "] {
        top.press("f");
        let screen = top.wait_shown("? y/n");
        let question = format!("(pid {})? y/n", std::process::id());
        assert!(
            screen.contains("Release orders:42, held by ") && screen.contains(&question),
            "{screen}"
        );
        top.press(no);
        top.wait_gone("y/n");
    }
    guard.ensure_held().unwrap();
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(guard.id().as_str()));
    top.press("F");
    top.wait_shown("? y/n");
    top.press("y");
    top.wait_shown("released orders:42");
    assert_eq!(expect_loss(&guard), LockLost::Gone);
    top.wait_shown("no locks are held");
}

#[test]
fn lock_released_in_top_goes_to_next_waiter() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("orders:42", &with_ttl(9 * SECOND)).unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "orders:42");
    let mut top = top(&server);
    top.wait_shown("1 waiter,");
    top.press("\r");
    top.wait_shown(guard.id().as_str());
    top.press("f");
    top.wait_shown("? y/n");
    top.press("y");
    let next = waiting.join().unwrap().unwrap();
    assert!(
        matches!(expect_loss(&guard), LockLost::Taken { by, .. } if by.id() == next.id().as_str())
    );
    top.wait_shown("released orders:42");
    top.wait_shown(next.id().as_str());
    assert!(next.is_held());
}

#[test]
fn release_in_top_takes_the_lock_from_all_members() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("orders:42").unwrap();
    let short = with_ttl(9 * SECOND);
    let readers = [lock.read_with(&short).unwrap(), lock.read_with(&short).unwrap()];
    let mut top = top(&server);
    top.wait_shown("2 readers: ");
    top.press("f");
    top.wait_shown("held by 2 readers: ");
    top.press("y");
    top.wait_shown("released orders:42");
    top.wait_shown("no locks are held");
    assert!(readers.iter().all(|reader| expect_loss(reader) == LockLost::Gone));
}

#[test]
fn lock_that_changes_hands_during_question_is_kept() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.wait_shown("orders:42");
    top.press("f");
    top.wait_shown("? y/n");
    guard.release().unwrap().unwrap_released();
    let next = mgr.lock("orders:42").unwrap();
    top.press("y");
    top.wait_shown("not released: orders:42 is now held by");
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(next.id().as_str()));
    assert!(next.is_held());
    drop(next);
    top.wait_shown("no locks are held");
}

#[test]
fn failed_release_is_reported_in_top() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.wait_shown("orders:42");
    top.press("f");
    top.wait_shown("? y/n");
    guard.release().unwrap().unwrap_released();
    top.press("y");
    top.wait_shown("orders:42 was not held any more");
    let _guard = mgr.lock("mail").unwrap();
    top.wait_shown("mail");
    server.kill();
    top.wait_shown("NO REPLY");
    top.press("f");
    top.wait_shown("? y/n");
    top.press("y");
    top.wait_shown("could not release mail: ");
}

#[test]
fn pasted_text_does_not_confirm_release() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let mut top = top(&server);
    top.wait_shown("orders:42");
    top.press("\x1b[200~fyyy\x1b[201~");
    top.press("f");
    top.wait_shown("? y/n");
    top.press("\x1b[200~y\x1b[201~");
    top.press("n");
    top.wait_gone("y/n");
    top.press("p");
    top.wait_shown("PAUSED");
    assert!(guard.is_held());
    assert_eq!(get(&server, "lock:orders:42").as_deref(), Some(guard.id().as_str()));
}
