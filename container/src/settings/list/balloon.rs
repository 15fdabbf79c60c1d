//! The balloon, which gives memory of the guest back to the host.

use crate::settings::variable::{Variable, variables};

pub(super) const BALLOON: &[Variable] = variables! {
    /// The guest gives memory back while the host is short of it.
    done "BALLOONING" = "N" (balloon.on);
    /// What the guest keeps at least: a share of its memory, or a size.
    done "BALLOONING_MIN_MEM" = "33%" (balloon.least);
    /// From this share of the host's memory in use (per cent) the balloon grows.
    done "BALLOONING_RAM_THRESHOLD" = "80.0" (balloon.threshold);
    /// From this share in use (per cent) it grows as fast as it can.
    done "BALLOONING_RAM_THRESHOLD_HARD" = "90.0" (balloon.threshold_hard);
    /// From this share of time that the host waits for memory (per cent) the balloon grows.
    done "BALLOONING_PSI_PRESSURE" = "10.0" (balloon.pressure);
    /// From this share of time it grows as fast as it can.
    done "BALLOONING_PSI_PRESSURE_MAX" = "50.0" (balloon.pressure_max);
    /// Changes that are smaller are not made.
    done "BALLOONING_HYSTERESIS" = "128M" (balloon.hysteresis);
    /// How strongly the balloon follows what is missing now.
    done "BALLOONING_KP" = "0.5" (balloon.proportional);
    /// How strongly it follows what was missing all the time.
    done "BALLOONING_KI" = "0.05" (balloon.integral);
    /// Seconds between two looks.
    done "BALLOONING_INTERVAL" = "5" (balloon.interval);
    /// What the balloon says of itself: N, Y, controller, qmp or all.
    done "BALLOONING_DEBUG" = "N" (balloon.debug);
    /// Where a process id would stand.
    ignored "BALLOONING_PID" = "" => "the balloon is no process of its own: leave it out";
    /// Where a socket would be.
    ignored "BALLOONING_SOCKET" = "" => "the balloon needs no socket: leave it out";
};
