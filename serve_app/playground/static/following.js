// Scrolling: the page stays at the end of a conversation while it grows, unless its reader has scrolled up.

import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

/** At most so far from the end a reader is at it, in pixels. */
const NEAR = 48;
const MARGIN = 12;

/**
 * Return whether the page follows after a scroll. Going up ends it, and coming to the end begins it again. A page that
 * has become shorter is scrolled up by the browser, and is then exactly at its end.
 * @param {boolean} isFollowing Before the scroll.
 * @param {number} movedBy Pixels; negative is up.
 * @param {number} distance Pixels from the lower edge of the window to the end; negative below it.
 */
export function isFollowed(isFollowing, movedBy, distance) {
  if (movedBy < 0) return distance <= 1;
  return isFollowing || distance <= NEAR;
}

/**
 * Keep the end of a conversation in view while it grows.
 * @param {boolean} isGrowing
 * @param {any} last The last turn: for another one, and when it begins to grow again, the page goes to the end.
 * @param {boolean} isShown Whether there is a conversation at all.
 * @returns {{talk: {current: any}, end: {current: any}, isAway: boolean, toEnd: () => void}} Refs of the conversation
 *   and of what stands at its end, whether the end is out of view, and a function that goes there.
 */
export function useFollowing(isGrowing, last, isShown = true) {
  const talk = useRef(null);
  const end = useRef(null);
  const state = useRef({ isFollowing: true, y: 0, isGrowing });
  const [isAway, setAway] = useState(false);
  state.current.isGrowing = isGrowing;

  const distance = () => end.current.getBoundingClientRect().bottom + MARGIN - innerHeight;
  const isHidden = () => !talk.current?.clientHeight; // another tab is shown
  const toEnd = () => {
    if (isHidden()) return;
    state.current.isFollowing = true;
    if (distance() > 0) scrollBy(0, distance());
    state.current.y = scrollY;
    setAway(false);
  };

  useEffect(() => {
    if (!isShown) return undefined;
    const note = () => {
      if (isHidden()) return;
      const it = state.current;
      it.isFollowing = isFollowed(it.isFollowing, scrollY - it.y, distance());
      it.y = scrollY;
      setAway(distance() > NEAR);
    };
    const grown = () => {
      if (isHidden()) return;
      if (state.current.isFollowing && state.current.isGrowing) toEnd();
      else setAway(distance() > NEAR);
    };
    state.current.y = scrollY;
    addEventListener("scroll", note, { passive: true });
    addEventListener("resize", grown);
    const sizes = new ResizeObserver(grown);
    sizes.observe(talk.current);
    return () => {
      removeEventListener("scroll", note);
      removeEventListener("resize", grown);
      sizes.disconnect();
    };
  }, [isShown]);
  const wasGrowing = useRef(false);
  useLayoutEffect(() => {
    // The last drawing of an answer is taller: its figures and buttons come.
    if (isGrowing || (wasGrowing.current && state.current.isFollowing)) toEnd();
    wasGrowing.current = isGrowing;
  }, [isGrowing, last]);
  return { talk, end, isAway, toEnd };
}
