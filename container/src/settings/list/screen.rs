//! Variables of the screen, in browsers and by VNC.

use crate::settings::variable::{Variable, variables};

pub(super) const SCREEN: &[Variable] = variables! {
    /// How the screen is shown: `web` (in browsers, and by VNC if VNC_PORT is set), `vnc`,
    /// `disabled` (the guest has a display that is not shown) or `none` (no display).
    translated "DISPLAY" = "web" (screen.display);
    /// The display adapter of the guest: `std`, `virtio` (its size follows the viewer's window, if
    /// the guest has its driver) or `none`.
    translated "VGA" = "std" (screen.adapter);
    /// The port for VNC viewers, which connect without TLS. By default the container does not
    /// listen for them, unless DISPLAY is `vnc` or COMPAT is `dockur` (then at 5900). Their
    /// password is generated, and `transom password` prints it.
    full "VNC_PORT" = "" (screen.vnc_port);
    /// Enables the web server.
    full "WEB" = "Y" (screen.web);
    /// The port of the web server.
    full "WEB_PORT" = "8006" (screen.web_port);
    /// Viewers must enter USERNAME and PASSWORD. If PASSWORD is not set, one is generated. Defaults
    /// to Y, but to N if COMPAT is dockur, or if VERSION is probe and PASSWORD is not set. With N,
    /// everybody who can reach the port can use the screen.
    full "PROTECT" = "" (screen.protect);
    /// The password of the screen, if it differs from PASSWORD.
    full "PASS" = "" (screen.pass);
    /// Lossy compression of the picture.
    ignored "LOSSY" = "N"
        => "every viewer chooses its own picture quality: set the quality there";
    /// Renders with a graphics card of the host.
    ignored "GPU" = "N" => "a graphics card of the host cannot be passed through: leave it out";
    /// The render node of the graphics card.
    ignored "RENDERNODE" = ""
        => "a graphics card of the host cannot be passed through: leave it out";
    /// The parts of NVIDIA's driver that the container engine provides.
    ignored "NVIDIA_DRIVER_CAPABILITIES" = ""
        => "a graphics card of the host cannot be passed through: leave it out";
    /// Text is copied and pasted between viewers and the guest, if SPICE's agent runs in it
    /// (`spice-vdagent` in Linux, part of virtio-win's guest tools for Windows).
    full "CLIPBOARD" = "Y" (screen.clipboard);
    /// Adds a sound card (HDA), which viewers in browsers and by VNC can hear. It records silence.
    full "AUDIO" = "N" (screen.audio);
    /// The sound card that AUDIO=Y adds.
    translated "SOUND" = "hda" (screen.sound);
    /// The socket of the viewer inside the container.
    ignored "WSS_SOCKET" = "" => "the viewer needs no socket of its own: leave it out";
    /// The port of the viewer, in old versions.
    ignored "WSS_PORT" = "" => "the viewer is at WEB_PORT, below /websockify: leave it out";
    /// The port of the status page, in old versions.
    ignored "WSD_PORT" = "" => "the status is at WEB_PORT, below /status: leave it out";
    /// Origins (scheme, host and port) under which browsers reach the container. Needed behind a
    /// proxy that hides the original host, or with PROTECT=N under a public name.
    full "WEB_ORIGIN" = "" (screen.web_origin);
    /// Trusted proxies: addresses and networks whose forwarding headers (`X-Forwarded-For` and the
    /// like) are believed.
    full "WEB_PROXY" = "" (screen.web_proxy);
};
