//! The check of the user's permissions.

use super::{
    facts::{NodeFacts, Queried, Requirements},
    finding::Finding,
    grant_command,
    permissions::{
        HAND_OVER_PERMISSIONS, INSPECT_PERMISSIONS, NODE_PERMISSIONS, SETTINGS_PERMISSION,
        SHARED_PERMISSIONS,
    },
};

pub(super) const GRANT_ADVICE: &str = "run these in redis-cli as an administrator";
/// Advice for a command that adds key patterns or channel patterns which may be there already.
pub(super) const PASTE_ADVICE: &str = "run these in redis-cli as an administrator; if the server \
                                       replies that a pattern follows the * pattern, leave out \
                                       the patterns of that kind (~ or &)";

/// Reports the missing permissions, with the command that grants them.
pub(super) fn check_permissions(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    let missing = &node.permissions.missing;
    // For a single server, the checks that need `NODE_PERMISSIONS` report them.
    let is_reported = |name: &&str| requirements.nodes > 1 || !NODE_PERMISSIONS.contains(name);
    let reported = missing.iter().map(String::as_str).filter(is_reported);
    let (shared, reported): (Vec<&str>, Vec<&str>) =
        reported.partition(|name| SHARED_PERMISSIONS.contains(name));
    let (hand_over, reported): (Vec<&str>, Vec<&str>) =
        reported.into_iter().partition(|name| HAND_OVER_PERMISSIONS.contains(name));
    let (inspect, needed): (Vec<&str>, Vec<&str>) =
        reported.into_iter().partition(|name| INSPECT_PERMISSIONS.contains(name));
    let mut says = Vec::new();
    match (needed.is_empty(), inspect.is_empty()) {
        (true, true) => {}
        (true, false) => {
            says.push(format!("some commands cannot work; missing: {}", inspect.join(" ")));
        }
        (false, true) => says.push(format!("missing: {}", needed.join(" "))),
        (false, false) => says.push(format!(
            "missing: {}, and to inspect locks: {}",
            needed.join(" "),
            inspect.join(" ")
        )),
    }
    if !shared.is_empty() {
        says.push(format!("read-write locks and semaphores also need {}", shared.join(" ")));
    }
    if says.is_empty() {
        let all = "all permissions that locks need";
        return Some(match hand_over.join(" ") {
            further if further.is_empty() => Finding::ok("permissions", all),
            further => Finding::ok(
                "permissions",
                format!("{all}; hand-overs cost the server less with {further}"),
            ),
        });
    }
    let untested = &node.permissions.untested;
    if !untested.is_empty() {
        says.push(format!("cannot be tested without them: {}", untested.join(" ")));
    }
    // What only some checks need is granted with the rest, so that the next run checks everything.
    let settings = (node.appendfsync == Queried::Denied).then_some(SETTINGS_PERMISSION);
    let granted = missing.iter().chain(untested).map(String::as_str).chain(settings);
    let says = says.join("; ");
    let finding = if needed.is_empty() {
        Finding::warning("permissions", says)
    } else {
        Finding::problem("permissions", says)
    };
    let is_pattern = |permission: &String| permission.starts_with(['~', '&']);
    let advice = if untested.iter().any(is_pattern) { PASTE_ADVICE } else { GRANT_ADVICE };
    Some(finding.advice(advice).acl_setuser(grant_command::grant_command(&node.user, granted)))
}
