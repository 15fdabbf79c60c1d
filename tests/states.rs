//! Volumes as the reference image leaves them, and as this one does: real pods start on each, up to
//! their machine, which is a script that keeps its configuration. Also mistakes of users: one
//! sentence each, and the reference's exit status. Logins at the page over a new start.
#![forbid(unsafe_code)]

#[path = "states/kept.rs"]
mod kept;
#[path = "states/leaves.rs"]
mod leaves;
#[path = "states/left.rs"]
mod left;
#[path = "states/logins.rs"]
mod logins;
#[path = "states/mistakes.rs"]
mod mistakes;
#[path = "states/reference.rs"]
mod reference;
#[path = "states/server.rs"]
mod server;
#[path = "states/world.rs"]
mod world;

use transom_tests::place::runs_here;
