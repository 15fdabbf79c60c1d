//! BARs move as Windows 11 25H2 moves them, while their devices work.

use transom_tests::rebalance::keeps_working;

use crate::runs_here;

#[test]
fn devices_work_while_their_bars_move_over_each_other() {
    if !runs_here("devices_work_while_their_bars_move_over_each_other") {
        return;
    }
    keeps_working(13).expect("all requests, and fast doorbells");
}
